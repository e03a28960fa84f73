"""What was measured, filed by batch and context: step times, and tokens kept a cycle.

A time belongs to a cell, because both a cycle and a decode grow with the batch and the context, and not alike.
Acceptance belongs to the text, not to the cell.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SPECULATE, PLAIN = "speculate", "plain"
MODES = (SPECULATE, PLAIN)

# So many step times are kept; their median is the figure. One in two may be disturbed (a prefill on another stream,
# garbage collection) before the figure moves.
WINDOW = 31
ENOUGH = 4
# So many are kept for the calm level, their lower quartile: a stretch of slow steps has to last for three quarters of
# them before that moves.
LONG = 256

Key = tuple[int, int]


def key_of(batch: int, context: int) -> Key:
    """The cell of a batch: exact batches up to 4, then powers of two; a context bucket an octave above 1024."""
    size = batch if batch <= 4 else 1 << (batch - 1).bit_length()
    return size, max(10, (context - 1).bit_length())


@dataclass
class Samples:
    """Step times of one mode in one cell."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    at: int = 0
    longer: deque[float] = field(default_factory=lambda: deque(maxlen=LONG))
    _median: float | None = field(default=None, repr=False)

    def add(self, ms: float, step: int) -> None:
        """Add one; ``step`` is when."""
        self.values.append(ms)
        self.longer.append(ms)
        self.at = step
        self._median = None

    @property
    def ms(self) -> float | None:
        """The median, or None before there are enough."""
        if len(self.values) < ENOUGH:
            return None
        if self._median is None:
            # Asked for in every decision, for every cell of a batch size; of most of them nothing has changed.
            self._median = statistics.median(self.values)
        return self._median

    @property
    def calm_ms(self) -> float | None:
        """The lower quartile of the longer window, or None before there are enough."""
        if len(self.longer) < ENOUGH:
            return None
        # Nearest rank, not rounded up: of four the lowest.
        return sorted(self.longer)[(len(self.longer) - 1) // 4]


class Cells:
    """Step times by mode, batch and context.

    A cell without figures of its own takes those of the nearest context with the same batch: a request grows into the
    next bucket every time its context doubles, and starting from nothing there would mean probing for no reason.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[str, Key], Samples] = {}

    def add(self, mode: str, key: Key, ms: float, step: int) -> None:
        """Add one step time."""
        own = self._cells.get((mode, key))
        if own is None:
            own = self._cells[mode, key] = Samples()
        own.add(ms, step)

    def renew(self, mode: str, key: Key, times: Iterable[float], step: int) -> None:
        """Put these step times in the place of all that the cell held."""
        kept = list(times)
        self._cells[mode, key] = Samples(deque(kept, maxlen=WINDOW), step, deque(kept, maxlen=LONG))

    def own(self, mode: str, key: Key) -> Samples | None:
        """The cell's samples, if there are any."""
        return self._cells.get((mode, key))

    def ms(self, mode: str, key: Key) -> float | None:
        """Milliseconds of a step, from this cell or the nearest one of its batch; None when there is none."""
        own = self._cells.get((mode, key))
        if own is not None and own.ms is not None:
            return own.ms
        near = self._nearest(mode, key)
        return near[1].ms if near is not None else None

    def _nearest(self, mode: str, key: Key) -> tuple[int, Samples] | None:
        """The cell of the nearest context with enough samples (the shorter of two), and how many octaves longer it is."""
        known = [
            (abs(other[1] - key[1]), other[1], samples)
            for (kind, other), samples in self._cells.items()
            if kind == mode and other[0] == key[0] and samples.ms is not None
        ]
        if not known:
            return None
        _, octave, samples = min(known, key=lambda item: item[:2])
        return octave - key[1], samples

    def age(self, mode: str, key: Key, step: int) -> int | None:
        """Steps since the cell itself last saw this mode; None when it never did."""
        own = self._cells.get((mode, key))
        return step - own.at if own is not None and own.ms is not None else None

    def age_near(self, mode: str, key: Key, step: int) -> int | None:
        """Steps since the samples that ``ms`` answers with; None where they are of a longer context.

        Steps get no cheaper as a context grows. So the figure of a shorter one errs to one side only, and a request that
        doubles need not be measured anew for that alone.
        """
        near = self._nearest(mode, key)
        return step - near[1].at if near is not None and near[0] <= 0 else None

    def __iter__(self) -> Iterator[tuple[str, Key, Samples]]:
        for (mode, key), samples in self._cells.items():
            yield mode, key, samples


class Kept:
    """Mean tokens that a request keeps of a cycle, bonus included, over about the last ``span`` cycles of requests."""

    def __init__(self, span: int = 128) -> None:
        self._span = span
        self._sum = 0.0
        self._weight = 0.0

    def add(self, kept: float, requests: int = 1) -> None:
        """Add the mean of ``requests`` requests of one cycle."""
        fade = (1.0 - 1.0 / self._span) ** requests
        self._sum = self._sum * fade + kept * requests
        self._weight = self._weight * fade + requests

    def forget(self, share: float) -> None:
        """Let the past count for ``share`` of what it did: what follows is other text."""
        self._sum *= share
        self._weight *= share

    @property
    def mean(self) -> float | None:
        """The mean; None before there are enough cycles."""
        return self._sum / self._weight if self._weight >= ENOUGH else None
