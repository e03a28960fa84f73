"""The verdict over rows: does speculation win, by how much, with which draft length, what eats the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang.bench_verify.rows import Row, context_label
from sglang.bench_verify.soundness import PHASES, doubts
from sglang.srt.speculative.stats.breakeven import best_drafted, judge

# Repeats of one case further apart than this are those of a machine with other work: a verdict from them is said to be.
RESTLESS = 1.5
# Share of cycles that keep the draft token at position 1, 2, ...: a chat draft of accept length 2.0 at two
# steps. A measured list takes its place wherever there is one.
DEFAULT_RATES = (0.64, 0.36, 0.2, 0.11)


@dataclass
class Verdict:
    """One context and batch of one variant.

    Attributes:
        decode_ms: plain decode, the baseline.
        cycles_ms: draft steps -> cycle time.
        best: draft steps with the most tokens a second, 0 = none.
        speedups: draft steps -> tokens a second over the baseline.
        needed: draft steps -> accept length at which it breaks even.
        shares: phase -> share of the cycle of the best (or only) draft length.
        doubts: why times or shares are rough, if they are.
    """

    variant: str
    context: int
    batch: int
    decode_ms: float
    cycles_ms: dict[int, float] = field(default_factory=dict)
    best: int = 0
    speedups: dict[int, float] = field(default_factory=dict)
    needed: dict[int, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def text(self) -> str:
        """One line for a person."""
        head = f"{self.variant}, context {context_label(self.context)}, batch {self.batch}: "
        if not self.cycles_ms:
            return head + f"decode {self.decode_ms:.3f} ms; no cycle was measured"
        shown = self.best or max(self.cycles_ms)
        if self.best:
            head += f"speculation wins {self.speedups[self.best]:.2f}x with {self.best} draft tokens"
        else:
            head += f"speculation loses ({self.speedups[shown]:.2f}x with {shown} draft tokens)"
        head += f"; cycle {self.cycles_ms[shown]:.3f} ms against decode {self.decode_ms:.3f} ms"
        head += f", needs {self.needed[shown]:.2f} accepted"
        if self.shares:
            largest = sorted(self.shares.items(), key=lambda item: -item[1])[:3]
            head += "; " + ", ".join(
                f"{name.replace('_', ' ')} {100 * share:.0f}%" for name, share in largest
            )
        if self.doubts:
            head += f" (rough: {', '.join(self.doubts)})"
        return head


def verdicts(rows: Iterable[Row], rates: Sequence[float] = DEFAULT_RATES) -> list[Verdict]:
    """Group rows by variant, context and batch and judge each group that has a baseline."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        context, batch = row.case.get("context"), row.case.get("batch")
        if isinstance(context, (int, float)) and isinstance(batch, (int, float)):
            groups.setdefault((row.variant, int(context), int(batch)), []).append(row)
    baselines = {
        (context, batch): _decode(group)
        for (variant, context, batch), group in groups.items()
        if _decode(group)
    }
    found = []
    for (variant, context, batch), group in sorted(groups.items()):
        # A variant that measured no decode of its own is compared with the other one's.
        decode = _decode(group) or baselines.get((context, batch))
        if decode is not None:
            found.append(_judge(variant, context, batch, decode, group, rates))
    return found


def _judge(
    variant: str, context: int, batch: int, decode: float, group: Sequence[Row], rates: Sequence[float]
) -> Verdict:
    verdict = Verdict(variant, context, batch, decode)
    phases: dict[int, Mapping[str, float]] = {}
    rough: dict[int, list[str]] = {}
    for row in group:
        width = row.case.get("draft_tokens")
        if isinstance(width, int) and width > 1 and "cycle_ms" in row.metrics:
            verdict.cycles_ms[width - 1] = row.metrics["cycle_ms"].value
            phases[width - 1] = row.phases_ms
            rough[width - 1] = doubts(row)
            if (spread := row.metrics["cycle_ms"].spread) > RESTLESS:
                rough[width - 1].append(f"repeats of the cycle differ by x{spread:.1f}")
    if not verdict.cycles_ms:
        return verdict
    verdict.best, verdict.speedups = best_drafted(verdict.cycles_ms, decode, rates)
    verdict.needed = {steps: judge(cycle, decode, 1.0).needed for steps, cycle in verdict.cycles_ms.items()}
    shown = phases.get(verdict.best or max(verdict.cycles_ms), {})
    total = sum(shown.get(name, 0.0) for name in PHASES)
    if total > 0:
        verdict.shares = {name: shown[name] / total for name in PHASES if name in shown}
    verdict.doubts = rough[verdict.best or max(verdict.cycles_ms)]
    return verdict


def _decode(group: Sequence[Row]) -> float | None:
    values = [row.metrics["decode_ms"].value for row in group if "decode_ms" in row.metrics]
    return values[-1] if values else None
