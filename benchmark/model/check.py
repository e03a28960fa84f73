"""The model against what was measured: the H200 slice and the field report."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.model.predict import UPSTREAM, kimi, predict, reference_slice

# Reference figures of upstream 0.5.17, one H200, batch 1, bf16 KV; contexts as prompted, 136 tokens generated.
MEASURED_DECODE_MS = {1000: 1.905, 16000: 2.286, 64000: 3.030}
MEASURED_CYCLE_MS = {1000: 6.015, 16000: 41.096, 64000: 156.306}
MEASURED_PARTS_MS = {"verify attention": 2.88 * 12 / 13, "experts": 0.64, "busy": 4.88}
GENERATED = 70

FIELD_PROMPT, FIELD_OUTPUT = 32, 2048
FIELD_DECODE_MS, FIELD_VERIFY_MS, FIELD_ODD_VERIFY_MS = 12.15, 29.0, 19.0


@dataclass(frozen=True)
class Comparison:
    """One figure: predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error, positive when predicted too high."""
        return self.predicted / self.measured - 1.0


def slice_comparisons() -> list[Comparison]:
    """Decode and cycle of the reference slice at each context, and the parts that the profile gave at 1k."""
    found = []
    for context, measured in MEASURED_DECODE_MS.items():
        guess = predict(reference_slice(), UPSTREAM, context + GENERATED)
        found.append(Comparison(f"decode at {context}", guess.decode_ms, measured))
    for context, measured in MEASURED_CYCLE_MS.items():
        guess = predict(reference_slice(), UPSTREAM, context + GENERATED)
        found.append(Comparison(f"cycle at {context}", guess.cycle_ms, measured))
    guess = predict(reference_slice(), UPSTREAM, 1000 + GENERATED)
    busy = guess.cycle_ms - guess.phases_ms["host"]
    found.append(
        Comparison(
            "verify attention at 1000",
            guess.verify_parts_ms["attention"],
            MEASURED_PARTS_MS["verify attention"],
        )
    )
    found.append(
        Comparison("experts at 1000", guess.verify_parts_ms["experts"], MEASURED_PARTS_MS["experts"])
    )
    found.append(Comparison("busy at 1000", busy, MEASURED_PARTS_MS["busy"]))
    return found


def mean_context(prompt: int = FIELD_PROMPT, output: int = FIELD_OUTPUT) -> int:
    """Mean tokens before a step, over an answer of ``output`` tokens: a serial kernel is linear in it."""
    return prompt + output // 2


def field_comparisons() -> list[Comparison]:
    """The field report: decode with CUDA graph, and upstream's verify of 3 tokens, at their lengths."""
    guess = predict(kimi("rtxpro6000x8"), UPSTREAM, mean_context())
    return [
        Comparison("field report: decode", guess.decode_ms, FIELD_DECODE_MS),
        Comparison("field report: verify of 3", guess.phases_ms["verify"], FIELD_VERIFY_MS),
    ]


def context_of_verify(target_ms: float) -> int:
    """Mean context at which upstream's verify would take ``target_ms`` on their machine (bisection)."""
    low, high = 0, 200_000
    while high - low > 1:
        middle = (low + high) // 2
        if predict(kimi("rtxpro6000x8"), UPSTREAM, middle).phases_ms["verify"] < target_ms:
            low = middle
        else:
            high = middle
    return low
