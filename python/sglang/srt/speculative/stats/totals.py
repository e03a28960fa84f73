"""Sums of phase times, and windows over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("draft", "verify", "sample", "draft_extend", "host_gap")
DECODE = ("decode", "host_gap")


@dataclass
class PhaseTotals:
    """Milliseconds by phase, and how many cycles gave them.

    Attributes:
        ms: device milliseconds by phase.
        host_ms: host milliseconds by phase: what launching it took on the processor.
        counts: cycles by phase; a gap is only measured between two cycles that follow each other.
    """

    ms: dict[str, float] = field(default_factory=dict)
    host_ms: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, ms: Mapping[str, float], host_ms: Mapping[str, float] | None = None) -> None:
        """Add one cycle."""
        for name, value in ms.items():
            self.ms[name] = self.ms.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1
        for name, value in (host_ms or {}).items():
            self.host_ms[name] = self.host_ms.get(name, 0.0) + value

    def copy(self) -> PhaseTotals:
        """A snapshot to subtract later."""
        return PhaseTotals(dict(self.ms), dict(self.host_ms), dict(self.counts))

    def since(self, earlier: PhaseTotals) -> PhaseTotals:
        """What was added after ``earlier``."""
        return PhaseTotals(
            {name: value - earlier.ms.get(name, 0.0) for name, value in self.ms.items()},
            {name: value - earlier.host_ms.get(name, 0.0) for name, value in self.host_ms.items()},
            {name: count - earlier.counts.get(name, 0) for name, count in self.counts.items()},
        )

    def mean(self) -> dict[str, float]:
        """Milliseconds a cycle by phase, phases that never ran left out."""
        return {name: self.ms[name] / count for name, count in self.counts.items() if count > 0}

    def mean_host(self) -> dict[str, float]:
        """Host milliseconds a cycle by phase."""
        return {
            name: value / self.counts[name]
            for name, value in self.host_ms.items()
            if self.counts.get(name, 0) > 0
        }

    @property
    def cycles(self) -> int:
        """Cycles measured."""
        return max(self.counts.values(), default=0)

    @property
    def cycle_ms(self) -> float:
        """One cycle with the gap before the next one; 0 before the first."""
        return sum(self.mean().values())
