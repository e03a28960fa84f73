"""Time stamps of many blocks (``stamps``) on one axis, and what they say: stages, steps, and what lies between calls.

A multiprocessor's clock counts its own cycles; the device-wide timer is shared but may tick as seldom as once a
microsecond. Every record holds both at its start and at its end, and the truth lies between a reading of the timer and the
next tick, so each record narrows the offset of its multiprocessor: with a few dozen records it is known to some hundredths
of a tick.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from sglang.srt.layers.attention.verify.stamps import FIELDS

Record = dict[str, int]
Spread = tuple[float, float, float]

# Clocks, in the order in which a block reaches them (copying and multiplying warps run beside each other).
CLOCKS = tuple(f for f in FIELDS if f not in ("multiprocessor", "timer_first", "timer_last", "work"))
STEPS = (
    ("start", "lengths_read"),
    ("lengths_read", "slots_read"),
    ("slots_read", "first_copies_sent"),
    ("first_copies_sent", "first_keys_there"),
    ("start", "wait_over"),
    ("wait_over", "inputs_there"),
    ("first_copies_sent", "last_copies_sent"),
    ("last_copies_sent", "last_keys_there"),
    ("last_keys_there", "products_done"),
    ("products_done", "left_for_others"),
    ("left_for_others", "others_there"),
    ("others_there", "written"),
    ("products_done", "written"),
    ("inputs_there", "written"),
    ("start", "written"),
)


def read_records(rows: torch.Tensor) -> list[Record]:
    """Records of the blocks that had work; ``rows`` [programs, WIDTH] int64, -1 where nothing was stamped."""
    found = [dict(zip(FIELDS, row, strict=False)) for row in rows.tolist()]
    return [r for r in found if r["work"] > 0 and r["start"] >= 0]


@dataclass(frozen=True)
class Axis:
    """From clocks to microseconds: ``us = (clock - offset of the multiprocessor) / cycles_per_us``."""

    cycles_per_us: float
    offsets: dict[int, float]

    @classmethod
    def fit(cls, records: Sequence[Record]) -> Axis:
        """Fit to the timer readings (nanoseconds). Raises ValueError when there are too few records."""
        pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for r in records:
            pairs[r["multiprocessor"]] += [(r["start"], r["timer_first"]), (r["written"], r["timer_last"])]
        rates = []
        for found in pairs.values():
            (c0, t0), (c1, t1) = min(found), max(found)
            if t1 > t0:
                rates.append(1e3 * (c1 - c0) / (t1 - t0))
        if not rates:
            raise ValueError(f"{len(records)} records span no tick of the timer; trace more calls")
        rate = statistics.median(rates)
        ticks = sorted({t for found in pairs.values() for _, t in found})
        tick = min((b - a for a, b in pairwise(ticks)), default=1)
        offsets = {}
        for sm, found in pairs.items():
            # timer <= truth < timer + tick, for every reading.
            low = max(t - 1e3 * c / rate for c, t in found)
            high = min(t + tick - 1e3 * c / rate for c, t in found)
            offsets[sm] = -(low + high) / 2 * rate / 1e3
        return cls(rate, offsets)

    def us(self, record: Record, field: str) -> float | None:
        """Microseconds on the common axis, None where the stage was not stamped."""
        if record[field] < 0:
            return None
        return (record[field] - self.offsets[record["multiprocessor"]]) / self.cycles_per_us


def _spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return (round(ordered[0], 2), round(statistics.median(ordered), 2), round(ordered[-1], 2))


def stages(
    calls: Sequence[Sequence[Record]], origins: Sequence[Sequence[Record]], axis: Axis
) -> dict[str, Spread]:
    """When blocks reach each stage, after the first start among the call's ``origins``: medians over calls of the minimum,
    median and maximum over blocks."""
    found: dict[str, list[Spread]] = defaultdict(list)
    for call, origin in zip(calls, origins, strict=True):
        zero = min(t for r in origin if (t := axis.us(r, "start")) is not None)
        for field in CLOCKS:
            times = [t - zero for r in call if (t := axis.us(r, field)) is not None]
            if times:
                found[field].append(_spread(times))
    return {f: _middle(spreads) for f, spreads in found.items()}


def _middle(spreads: Sequence[Spread]) -> Spread:
    low, middle, high = (round(statistics.median(column), 2) for column in zip(*spreads, strict=True))
    return (low, middle, high)


def steps(records: Sequence[Record], axis: Axis) -> dict[str, Spread]:
    """How long each step took within a block: minimum, median, maximum over all blocks."""
    found = {}
    for before, after in STEPS:
        times = [
            (r[after] - r[before]) / axis.cycles_per_us for r in records if r[before] >= 0 and r[after] >= 0
        ]
        if times:
            found[f"{before} > {after}"] = _spread(times)
    return found


def gaps(
    splits: Sequence[Sequence[Record]], merges: Sequence[Sequence[Record]], axis: Axis, middle: Iterable[int]
) -> dict[str, Spread]:
    """What lies between a call and the next, minimum, median and maximum over calls; negative where they overlap.

    ``idle_of_keys``: on one multiprocessor, from the last keys of one call to the first of the next. ``turnover``: there,
    from the end of a block to the start of the next call's. ``late_blocks``: blocks of a split that start more than 2 us
    after the median one.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for i in middle:
        if i + 1 >= len(splits) or not splits[i] or not splits[i + 1]:
            continue
        after = {r["multiprocessor"]: r for r in splits[i + 1]}
        both = [(r, after[r["multiprocessor"]]) for r in splits[i] if r["multiprocessor"] in after]
        for name, last, first in (
            ("idle_of_keys", "last_keys_there", "first_keys_there"),
            ("turnover", "written", "start"),
        ):
            # One multiprocessor, one clock: no offset needed.
            times = [
                (b[first] - a[last]) / axis.cycles_per_us for a, b in both if a[last] >= 0 and b[first] >= 0
            ]
            if times:
                found[f"{name}_median"].append(statistics.median(times))
                found[f"{name}_most"].append(max(times))
        starts = sorted(t for r in splits[i + 1] if (t := axis.us(r, "start")) is not None)
        found["late_blocks"].append(float(sum(t > starts[len(starts) // 2] + 2 for t in starts)))
        ends = [t for r in splits[i] if (t := axis.us(r, "written")) is not None]
        found["first_end_to_last_end"].append(max(ends) - min(ends))
        found["last_end_to_median_start"].append(starts[len(starts) // 2] - max(ends))
        if merges[i]:
            begun = [t for r in merges[i] if (t := axis.us(r, "start")) is not None]
            done = [t for r in merges[i] if (t := axis.us(r, "written")) is not None]
            found["late_merges"].append(float(sum(t > min(ends) for t in begun)))
            found["split_end_to_merge_end"].append(max(done) - max(ends))
    return {name: _spread(values) for name, values in found.items()}
