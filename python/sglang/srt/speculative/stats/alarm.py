"""The alarm for an acceptance that collapses.

A draft that does not fit its target, and an all-reduce or a graph that corrupts silently, look alike from
outside: the text may be fine, every step gets slower, and only the accept length falls. So both are
watched: an acceptance that never was (a mismatched draft) and one that was and is gone (corruption).
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER = "draft accepts almost nothing"
LOST = "acceptance collapsed"


@dataclass(frozen=True)
class Alarm:
    """A collapse in words: what was seen and what to do."""

    kind: str
    text: str


class AcceptanceAlarm:
    """Judges windows of cycles; speaks once when the state changes.

    Args:
        window: cycles that make one judgement.
        floor: drafts accepted a cycle below which a draft is useless.
        drop: fraction of the best window so far below which acceptance counts as lost.
    """

    def __init__(self, window: int = 64, floor: float = 0.05, drop: float = 0.2) -> None:
        self._window = window
        self._floor = floor
        self._drop = drop
        self._cycles = 0
        self._drafts = 0
        self._best = 0.0
        self.active: str | None = None
        self.raised = 0

    def add(self, cycles: int, drafts: int) -> Alarm | None:
        """Count cycles and the drafts they kept; an Alarm when a window closes in a new bad state."""
        self._cycles += cycles
        self._drafts += drafts
        if self._cycles < self._window:
            return None
        mean = self._drafts / self._cycles
        cycles, self._cycles, self._drafts = self._cycles, 0, 0
        best, self._best = self._best, max(self._best, mean)
        state = None
        # Whether it ever worked decides which of the two it is.
        if best > 0 and mean < best * self._drop and best >= 2 * self._floor:
            state = LOST
        elif mean < self._floor:
            state = NEVER
        if state == self.active:
            return None
        self.active = state
        if state is None:
            return None
        self.raised += 1
        if state == LOST:
            return Alarm(
                LOST,
                f"acceptance collapsed: {mean:.3f} draft tokens kept a cycle over {cycles} cycles, {best:.3f} before. "
                "Text may still look right. Suspect a corrupted all-reduce or graph: restart, and if it comes back "
                "run with --disable-cuda-graph or --disable-custom-all-reduce to find which",
            )
        return Alarm(
            NEVER,
            f"draft accepts almost nothing: {mean:.3f} draft tokens kept a cycle over {cycles} cycles. "
            "Speculation only costs here. Check that --speculative-draft-model-path was trained for this target "
            "(same tokenizer, same layers captured), or switch speculation off",
        )
