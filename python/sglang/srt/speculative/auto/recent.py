"""The last steps by what they were: where a token's time goes, apart from probes, switches and catch-ups."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

# Enough for most of a bench's request; a step costs the same however many are kept.
KEPT = 1024
# What a step was: nothing special; one that wrote rows the draft was owed, or followed such a one (host and device
# pay in different steps); one of the two after a change of mode; the one that waited for a prefill.
STEADY, CAUGHT_UP, CHANGED, PREFILLED = "steady", "caught up", "changed", "prefilled"


class Recent:
    """Mode, kind and milliseconds of the last ``kept`` steps."""

    def __init__(self, kept: int = KEPT) -> None:
        self._steps: deque[tuple[str, str, float]] = deque(maxlen=kept)

    def add(self, mode: str, kind: str, ms: float) -> None:
        """A step ended: the time between its start and the next one's."""
        self._steps.append((mode, kind, ms))

    def summary(self) -> list[dict[str, Any]]:
        """For each mode and kind: ``steps``, ``median_ms``, ``mean_ms``, ``worst_ms``."""
        groups: dict[tuple[str, str], list[float]] = {}
        for mode, kind, ms in list(self._steps):
            groups.setdefault((mode, kind), []).append(ms)
        return [
            {
                "mode": mode,
                "kind": kind,
                "steps": len(times),
                "median_ms": round(statistics.median(times), 4),
                "mean_ms": round(statistics.fmean(times), 4),
                "worst_ms": round(max(times), 4),
            }
            for (mode, kind), times in sorted(groups.items())
        ]
