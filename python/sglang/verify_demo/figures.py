"""From answers to figures: agreement token by token, accept lengths, milliseconds, the results row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.verify_demo.client import Answer

#: Phases of one speculative cycle as the server's statistics name them, in the order they run.
PHASES = ("draft", "verify", "sample", "draft_extend", "host_gap")


@dataclass(frozen=True)
class Difference:
    """The first token at which two answers to one prompt part."""

    prompt: int
    position: int
    speculative: int | None
    plain: int | None


@dataclass
class Run:
    """One server's part of the demo."""

    name: str
    startup_s: float = 0.0
    peak_bytes: int = 0
    streamed: list[Answer] = field(default_factory=list)
    collected: list[Answer] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the streamed requests, one at a time, prefill included."""
        seconds = sum(answer.seconds for answer in self.streamed)
        return sum(answer.count for answer in self.streamed) / seconds if seconds else 0.0

    @property
    def decode_ms(self) -> float:
        """Milliseconds between the first and the last piece, per token after the first."""
        steps = sum(max(answer.count - 1, 0) for answer in self.streamed)
        return 1e3 * sum(answer.decode_seconds for answer in self.streamed) / steps if steps else 0.0


def differences(speculative: Sequence[Answer], plain: Sequence[Answer]) -> list[Difference]:
    """Where answers to the same prompts part, at most one entry a prompt."""
    found = []
    for index, (left, right) in enumerate(zip(speculative, plain, strict=True)):
        if left.tokens != right.tokens:
            same = 0
            while same < min(len(left.tokens), len(right.tokens)) and left.tokens[same] == right.tokens[same]:
                same += 1
            one, other = ((*answer.tokens, None)[same] for answer in (left, right))
            found.append(Difference(index, same, one, other))
    return found


def histogram(answers: Sequence[Answer]) -> list[int]:
    """Cycles by number of right drafts (index 0: none), summed over requests; empty if the server tells nothing."""
    total: list[int] = []
    for answer in answers:
        counts = (
            answer.meta.get("spec_correct_drafts_histogram") or answer.meta.get("spec_accept_histogram") or []
        )
        total += [0] * (len(counts) - len(total))
        for index, count in enumerate(counts):
            total[index] += count
    return total


def accept_length(counts: Sequence[int]) -> float:
    """Mean tokens a cycle, the target's own token included; 0.0 without cycles."""
    cycles = sum(counts)
    return sum((right + 1) * count for right, count in enumerate(counts)) / cycles if cycles else 0.0


def by_position(counts: Sequence[int]) -> list[float]:
    """Share of cycles in which the first 1, 2, ... drafts were all right."""
    cycles = sum(counts)
    return [sum(counts[place:]) / cycles for place in range(1, len(counts))] if cycles else []


def phases_ms(answers: Sequence[Answer]) -> dict[str, float]:
    """Milliseconds of each phase of a cycle, weighed by cycles, from the server's statistics.

    Only requests that ran alone should be passed: a shared cycle is counted by every request in it.
    Empty if the server has no such statistics (upstream, or the topic is off).
    """
    sums: dict[str, float] = {}
    cycles = 0
    for answer in answers:
        told = answer.meta.get("spec_cycle") or {}
        count = told.get("timed_cycles", 0)
        cycles += count
        for name in (*PHASES, "cycle"):
            if f"{name}_ms" in told:
                sums[name] = sums.get(name, 0.0) + told[f"{name}_ms"] * count
    return (
        {("wall" if name == "cycle" else name): value / cycles for name, value in sums.items()}
        if cycles
        else {}
    )


def cycle_ms(answers: Sequence[Answer], length: float, milliseconds_per_token: float) -> float:
    """Milliseconds a cycle: told by the server, else what a token takes times the tokens of a cycle."""
    return phases_ms(answers).get("wall", milliseconds_per_token * length)


def summary(speculative: Run, plain: Run) -> dict[str, Any]:
    """Every figure of the demo, plain numbers under the names of the results row."""
    counts = histogram(speculative.collected)
    length = accept_length(counts)
    alone = speculative.collected[: len(speculative.streamed)]
    return {
        "accept_length": length,
        "histogram": counts,
        "by_position": by_position(counts),
        "phases_ms": phases_ms(alone),
        "cycle_ms": cycle_ms(alone, length, speculative.decode_ms),
        "decode_ms": plain.decode_ms,
        "token_ms": speculative.decode_ms,
        "tok_s": speculative.tokens_per_second,
        "plain_tok_s": plain.tokens_per_second,
        "startup_s": speculative.startup_s,
        "plain_startup_s": plain.startup_s,
        "peak_bytes": speculative.peak_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "prompts": len(speculative.collected),
        "tokens": sum(answer.count for answer in speculative.collected),
        "differing": len(differences(speculative.collected, plain.collected)),
    }
