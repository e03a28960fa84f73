"""Boundaries of a cycle on the device timeline, read back without stopping the host.

On a GPU a boundary is an event in a preallocated ring. Elapsed times are asked for cycles later, once
the ring says the last event has passed: a query never waits, so the overlap of host and device that
the scheduler works for is not disturbed. On a CPU, where work is done when the call returns, a boundary
is the wall clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

GAP = "host_gap"


@dataclass(frozen=True)
class CycleTimes:
    """One cycle as read back.

    Attributes:
        kind: what ran (``cycle`` or ``decode``).
        batch: requests in it.
        context: mean tokens of a request's prefix.
        ms: device milliseconds by phase; ``host_gap`` only where the next cycle followed directly.
        host_ms: host milliseconds by phase.
    """

    kind: str
    batch: int
    context: int
    ms: dict[str, float]
    host_ms: dict[str, float]


class Stamp(Protocol):
    """A point on the device timeline."""

    def record(self) -> None:
        """Put the point at the end of the work issued so far."""

    def query(self) -> bool:
        """Whether the device has passed it; never waits."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to ``end``."""


class WallStamp:
    """The wall clock as a stamp, for devices whose calls return when the work is done."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Take the time."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """Always passed."""
        return True

    def elapsed_time(self, end: WallStamp) -> float:
        """Milliseconds to ``end``."""
        return (end.at - self.at) * 1e3


@dataclass(eq=False)
class _Slot:
    """The stamps of one cycle. ``names[i]`` is the phase that begins at ``stamps[i]``."""

    stamps: list[Any]
    host: list[float]
    names: list[str] = field(default_factory=list)
    kind: str = ""
    batch: int = 0
    context: int = 0
    follows: bool = False
    closed: bool = False
    parts: Callable[[], dict[str, float]] | None = None

    def reset(self, kind: str, batch: int, context: int, follows: bool) -> None:
        self.names.clear()
        self.host.clear()
        self.parts = None
        self.kind, self.batch, self.context, self.follows, self.closed = kind, batch, context, follows, False


class CycleClock:
    """A ring of cycles.

    Args:
        make_stamp: makes one stamp (``torch.cuda.Event(enable_timing=True)``, or ``WallStamp``).
        marks: most phases of a cycle.
        ring: cycles that may be in flight; one more is dropped and counted, never waited for.
        every: time one of so many cycles. The first stamp of the cycle after a timed one is always
            taken, because it closes the gap.
    """

    def __init__(self, make_stamp: Any, marks: int = 6, ring: int = 64, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}: time one of at least 1 cycles")
        self._free: deque[_Slot] = deque(
            _Slot([make_stamp() for _ in range(marks + 1)], []) for _ in range(ring)
        )
        self._pending: deque[_Slot] = deque()
        self._current: _Slot | None = None
        self._last: _Slot | None = None
        self.every = every
        self._index = 0
        self.dropped = 0
        self.timed = 0

    def begin(self, phase: str, kind: str = "cycle", batch: int = 1, context: int = 0) -> None:
        """Start a cycle whose first phase is ``phase``."""
        follows = self._last is not None
        timed = self._index % self.every == 0
        self._index += 1
        # The stamp that closes the previous gap is the begin of this cycle, timed or not.
        if not timed and not follows:
            self._current = None
            return
        if not self._free:
            self.dropped += 1
            self._current = self._last = None
            return
        slot = self._free.popleft()
        slot.reset(kind if timed else "", batch, context, follows)
        self._current = slot
        self._stamp(slot, phase)
        self._pending.append(slot)
        if not timed:
            slot.closed = True
            self._current = self._last = None

    def mark(self, phase: str) -> None:
        """The phase before ends and ``phase`` begins. Outside a timed cycle this does nothing."""
        slot = self._current
        if slot is not None and len(slot.names) < len(slot.stamps) - 1:
            self._stamp(slot, phase)

    def split(self, parts: Callable[[], dict[str, float]]) -> None:
        """The phase in progress is a whole cycle; ``parts`` says what its later phases took.

        Args:
            parts: milliseconds by phase, asked once the device has passed the cycle. What they leave of the time
                between the stamps belongs to the phase in progress, so the sum stays the time between the stamps.

        Outside a timed cycle this does nothing.
        """
        if self._current is not None:
            self._current.parts = parts

    def end(self) -> None:
        """The cycle ends; what follows until the next begin is the host gap."""
        slot = self._current
        if slot is None:
            return
        self._stamp(slot, GAP)
        slot.closed = True
        self.timed += 1
        self._current, self._last = None, slot

    def cut(self) -> None:
        """The next cycle does not follow the last one (a prefill or an idle server lies between)."""
        self._last = None

    def abandon(self) -> None:
        """Drop the cycle in progress: it did not run to its end."""
        if self._current is not None:
            self._pending.remove(self._current)
            self._free.append(self._current)
        self._current = self._last = None

    def drain(self) -> list[CycleTimes]:
        """The cycles that the device has passed, oldest first. Never waits."""
        done: list[CycleTimes] = []
        while self._pending:
            slot = self._pending[0]
            # The last cycle waits for its successor's first stamp, unless `cut` said there is none.
            if not slot.closed or slot is self._last:
                break
            following = self._pending[1] if len(self._pending) > 1 else None
            successor = following if following is not None and following.follows else None
            final = successor.stamps[0] if successor is not None else slot.stamps[len(slot.names) - 1]
            if not final.query():
                break
            self._pending.popleft()
            if slot.kind:
                done.append(self._read(slot, successor))
            self._free.append(slot)
        return done

    def _read(self, slot: _Slot, successor: _Slot | None) -> CycleTimes:
        ms: dict[str, float] = {}
        host: dict[str, float] = {}
        for index, name in enumerate(slot.names[:-1]):
            ms[name] = ms.get(name, 0.0) + slot.stamps[index].elapsed_time(slot.stamps[index + 1])
            host[name] = host.get(name, 0.0) + (slot.host[index + 1] - slot.host[index]) * 1e3
        if slot.parts is not None and ms:
            first = slot.names[0]
            for name, value in slot.parts().items():
                ms[name] = ms.get(name, 0.0) + value
                ms[first] -= value
        if successor is not None:
            ms[GAP] = max(0.0, slot.stamps[len(slot.names) - 1].elapsed_time(successor.stamps[0]))
            host[GAP] = (successor.host[0] - slot.host[-1]) * 1e3
        return CycleTimes(slot.kind, slot.batch, slot.context, ms, host)

    def _stamp(self, slot: _Slot, name: str) -> None:
        slot.stamps[len(slot.names)].record()
        slot.host.append(time.perf_counter())
        slot.names.append(name)
