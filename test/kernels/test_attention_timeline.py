"""The timeline of ``attention_trace``: clocks of several multiprocessors on one axis, although the timer ticks coarsely."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.attention.verify.stamps import FIELDS, WIDTH

from benchmark.attention_timeline import Axis, Record, gaps, read_records, stages, steps

RATE = 1755.0  # cycles a microsecond
TICK = 1000  # nanoseconds
OFFSETS = {0: 10_000_003, 1: 7, 2: 123_456_789}


def block(sm: int, start: float, **after: float) -> Record:
    """A block on multiprocessor ``sm`` from ``start`` us on; stages in us after its start."""
    record = dict.fromkeys(FIELDS, -1)
    for name, at in {"start": 0.0, **after}.items():
        record[name] = OFFSETS[sm] + round((start + at) * RATE)
    record |= {"multiprocessor": sm, "work": 64}
    record["timer_first"] = int(start * 1e3) // TICK * TICK
    record["timer_last"] = int((start + after["written"]) * 1e3) // TICK * TICK
    return record


def loop(calls: int, late: float = 0.0) -> tuple[list[list[Record]], list[list[Record]]]:
    """Calls of 13.37 us on three multiprocessors; ``late`` delays the block of multiprocessor 2."""
    splits, merges = [], []
    for i in range(calls):
        at = 5.0 + 13.37 * i
        stages_ = {
            "wait_over": 2.0,
            "first_keys_there": 3.0,
            "last_keys_there": 7.0,
            "products_done": 8.0,
            "written": 9.0,
        }
        splits.append([block(sm, at + 0.1 * sm + (late if sm == 2 else 0.0), **stages_) for sm in OFFSETS])
        merges.append([block(sm, at + 1.0, inputs_there=10.0, written=11.0) for sm in OFFSETS])
    return splits, merges


@pytest.fixture
def calls() -> tuple[list[list[Record]], list[list[Record]]]:
    return loop(24)


def everything(calls: tuple[list[list[Record]], list[list[Record]]]) -> list[Record]:
    return [r for part in calls for call in part for r in call]


def test_clocks_meet_on_one_axis(calls: tuple[list[list[Record]], list[list[Record]]]) -> None:
    axis = Axis.fit(everything(calls))
    assert axis.cycles_per_us == pytest.approx(RATE, rel=0.01)
    times = stages(calls[0], calls[0], axis)
    # A tick is 1 us; the stages are known to a small part of it.
    assert times["start"] == pytest.approx((0.0, 0.1, 0.2), abs=0.15)
    assert times["last_keys_there"] == pytest.approx((7.0, 7.1, 7.2), abs=0.2)
    assert "slots_read" not in times


def test_steps_need_no_axis_between_multiprocessors(
    calls: tuple[list[list[Record]], list[list[Record]]],
) -> None:
    found = steps(everything((calls[0], [])), Axis.fit(everything(calls)))
    assert found["last_keys_there > products_done"] == pytest.approx((1.0, 1.0, 1.0), abs=0.02)
    assert found["start > written"] == pytest.approx((9.0, 9.0, 9.0), abs=0.1)


def test_gaps_between_calls_and_late_blocks() -> None:
    for late, want in ((0.0, 0.0), (4.0, 1.0)):
        splits, merges = loop(24, late)
        axis = Axis.fit(everything((splits, merges)))
        found = gaps(splits, merges, axis, range(6, 18))
        assert found["late_blocks"][1] == want
        # From one call's last keys to the next one's first: 13.37 - 7 + 3.
        assert found["idle_of_keys_median"][1] == pytest.approx(9.37, abs=0.1)
        assert found["turnover_median"][1] == pytest.approx(13.37 - 9, abs=0.1)
        assert found["late_merges"][1] == 0.0
    assert found["split_end_to_merge_end"][1] == pytest.approx(12.0 - 13.2, abs=0.3)


def test_blocks_without_work_or_stamps_are_left_out() -> None:
    rows = torch.full((3, WIDTH), -1, dtype=torch.int64)
    rows[0] = 5
    rows[1] = 5
    rows[1, FIELDS.index("work")] = 0
    assert len(read_records(rows)) == 1


def test_too_short_a_trace_is_said_to_be_so() -> None:
    with pytest.raises(ValueError, match="more calls"):
        Axis.fit([block(0, 0.1, written=0.2)])
