"""The model against what was measured: the H200 slice and the field report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang.bench_verify.rows import Row

from benchmark.model import constants as c
from benchmark.model.predict import (
    FLOOR,
    FORK,
    FORK_ATTENTION,
    UPSTREAM,
    Path,
    kimi,
    predict,
    reference_slice,
)

# Upstream 0.5.17 on one H200, batch 1, bf16 KV, dummy routing. Totals of two runs on different machines: their
# difference at 1k (6.015 and 5.079 ms) is host time, which the first machine had less of to hide.
MEASURED_DECODE_MS = {1024: 1.872, 16384: 2.284, 65536: 2.972}
MEASURED_CYCLE_MS = {1024: 5.079, 16384: 41.882, 65536: 159.683}
MEASURED_PHASES_MS = {
    ("draft", 1024): 0.1866,
    ("draft", 16384): 0.4578,
    ("draft", 65536): 1.3275,
    ("verify", 1024): 4.4841,
    ("verify", 16384): 39.9568,
    ("verify", 65536): 153.6425,
    ("draft_extend", 1024): 0.3554,
    ("draft_extend", 16384): 1.4082,
    ("draft_extend", 65536): 4.7641,
}
GENERATED = 70
STOCK_DRAFT = 'count.verify_attention_calls{mode="draft_decode",path="stock"}'
# A gap between cycles above this share of them: the device waits for the host.
WAIT = 0.01
# In the name of a figure whose engine ran its cycles as one graph, for which the model has no measured constants yet.
ONE_GRAPH = " in one graph"

FIELD_PROMPT, FIELD_OUTPUT = 32, 2048
FIELD_DECODE_MS, FIELD_VERIFY_MS, FIELD_ODD_VERIFY_MS = 12.15, 29.0, 19.0


@dataclass(frozen=True)
class Comparison:
    """One figure: predicted and measured; ``waited`` where the device waited for the host in it."""

    name: str
    predicted: float
    measured: float
    waited: bool = False

    @property
    def error(self) -> float:
        """Relative error, positive when predicted too high."""
        return self.predicted / self.measured - 1.0


def slice_comparisons() -> list[Comparison]:
    """Decode, cycle and phases of upstream on the slice at each context."""
    found = []
    guesses = {
        context: predict(reference_slice(), UPSTREAM, context + GENERATED) for context in MEASURED_CYCLE_MS
    }
    for context, measured in MEASURED_DECODE_MS.items():
        found.append(Comparison(f"upstream decode at {context}", guesses[context].decode_ms, measured))
    for context, measured in MEASURED_CYCLE_MS.items():
        found.append(Comparison(f"upstream cycle at {context}", guesses[context].cycle_ms, measured))
    for (phase, context), measured in MEASURED_PHASES_MS.items():
        found.append(
            Comparison(f"upstream {phase} at {context}", guesses[context].phases_ms[phase], measured)
        )
    return found


def row_comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Fork and upstream rows of a slice against the model: decode, cycle, and the phases of a cycle.

    How fast the host is differs from machine to machine and is no prediction: a row's own launch time goes in. Where the
    device waited for that host, the wait lies in whichever phase it fell in, so of such a row only the cycle and the
    verify are compared.
    """
    found = []
    for row in rows:
        context = row.case.get("context")
        wanted = {"layers": 12, "experts": 64, "batch": 1}
        if row.bench != "slice" or any(row.case.get(name) != value for name, value in wanted.items()):
            continue
        if not isinstance(context, int) or (row.variant == "fork" and row.topics_off):
            continue
        path = _path(row)
        launch = row.phases_ms.get("launch")
        host = None if launch is None or _one_graph(row) else 1e3 * launch * c.HOST_OVER_LAUNCH.value
        guess = predict(
            reference_slice(row.case.get("router") == "dummy"), path, context + GENERATED, host_us=host
        )
        variant = f"{row.variant}{ONE_GRAPH if _one_graph(row) else ''}"
        name = f"{variant}, {row.case.get('router')} router, %s at {context}"
        if row.case.get("draft_tokens") == 0 and "decode_ms" in row.metrics:
            found.append(Comparison(name % "decode", guess.decode_ms, row.metrics["decode_ms"].value))
        if row.case.get("draft_tokens") == 3 and "cycle_ms" in row.metrics:
            cycle = row.metrics["cycle_ms"].value
            found.append(Comparison(name % "cycle", guess.cycle_ms, cycle))
            waits = row.phases_ms.get("host_gap", 0.0) > WAIT * cycle
            phases = ("verify",) if waits else ("draft", "verify", "sample", "draft_extend")
            for phase in phases:
                if phase in row.phases_ms:
                    found.append(
                        Comparison(name % phase, guess.phases_ms[phase], row.phases_ms[phase], waits)
                    )
    return found


def _one_graph(row: Row) -> bool:
    """Whether the whole cycle was one graph: its phases are marks inside it, and the host launches once."""
    return any(name.startswith("count.cycle_graph_replays") for name in row.counters)


def _path(row: Row) -> Path:
    """Which attention a row's engine ran; a draft's steps grow with the context as upstream's only in older trees."""
    if row.variant == "upstream":
        return UPSTREAM
    if _one_graph(row):
        return FLOOR
    return FORK_ATTENTION if STOCK_DRAFT in row.counters else FORK


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


@dataclass(frozen=True)
class Remedy:
    """How much longer one part of the predicted verify would have to take to give the reported one."""

    part: str
    predicted_ms: float
    factor: float


def what_would_explain_it() -> list[Remedy]:
    """The parts of the field report's verify, each with the factor that would close the gap alone, likeliest first."""
    guess = predict(kimi("rtxpro6000x8"), UPSTREAM, mean_context())
    missing = FIELD_VERIFY_MS - guess.phases_ms["verify"]
    found = [Remedy(name, ms, 1.0 + missing / ms) for name, ms in guess.verify_parts_ms.items() if ms > 0]
    return sorted(found, key=lambda remedy: remedy.factor)


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
