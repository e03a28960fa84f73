"""The arithmetic of a cycle: boundaries, kept tokens, break-even, alarm, baseline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.speculative.stats import accept, baseline, breakeven
from sglang.srt.speculative.stats.alarm import LOST, NEVER, AcceptanceAlarm
from sglang.srt.speculative.stats.clock import CycleClock
from sglang.srt.speculative.stats.collector import Collector, Window, line
from sglang.srt.speculative.stats.totals import PhaseTotals


class Device:
    """A fake device timeline: work is issued at once and passes when `run` says so."""

    def __init__(self) -> None:
        self.issued = 0.0
        self.passed = 0.0

    def work(self, ms: float) -> None:
        """Issue ``ms`` of device time."""
        self.issued += ms

    def run(self, until: float | None = None) -> None:
        """Let the device catch up."""
        self.passed = self.issued if until is None else until

    def stamp(self) -> Any:
        """A stamp on this timeline; reading one that has not passed is an error, as on a device."""
        device = self

        class Stamp:
            at = -1.0

            def record(self) -> None:
                self.at = device.issued

            def query(self) -> bool:
                return self.at <= device.passed

            def elapsed_time(self, end: Any) -> float:
                assert self.query() and end.query(), "the host would have waited"
                return float(end.at - self.at)

        return Stamp()


PARTS = {"draft": 0.6, "verify": 2.1, "sample": 0.1, "draft_extend": 0.4}


def one_cycle(clock: CycleClock, device: Device, parts: dict[str, float] = PARTS) -> None:
    """Run a cycle of these parts."""
    for index, (name, ms) in enumerate(parts.items()):
        if index == 0:
            clock.begin(name, batch=1, context=100)
        else:
            clock.mark(name)
        device.work(ms)
    clock.end()


def test_phases_and_gap_sum_to_the_wall() -> None:
    device = Device()
    clock = CycleClock(device.stamp)
    for _ in range(10):
        one_cycle(clock, device)
        device.work(0.2)
    device.run()
    done = clock.drain()
    assert len(done) == 9, "the last cycle waits for its successor"
    for times in done:
        assert times.ms == pytest.approx({**PARTS, "host_gap": 0.2})
    assert sum(sum(times.ms.values()) for times in done) == pytest.approx(9 * 3.4)


def test_nothing_is_read_before_the_device_passed_it() -> None:
    device = Device()
    clock = CycleClock(device.stamp)
    one_cycle(clock, device)
    one_cycle(clock, device)
    assert clock.drain() == []
    device.run(until=1.0)
    assert clock.drain() == []
    device.run()
    assert len(clock.drain()) == 1


def test_a_cut_gives_the_cycle_without_a_gap() -> None:
    device = Device()
    clock = CycleClock(device.stamp)
    one_cycle(clock, device)
    clock.cut()
    device.work(500.0)  # a prefill, or an idle server
    one_cycle(clock, device)
    device.run()
    (times,) = clock.drain()
    assert "host_gap" not in times.ms and sum(times.ms.values()) == pytest.approx(3.2)


def test_a_full_ring_drops_and_counts_instead_of_waiting() -> None:
    device = Device()
    clock = CycleClock(device.stamp, ring=4)
    for _ in range(20):
        one_cycle(clock, device)
        assert clock.drain() == []
    assert clock.dropped > 0
    device.run()
    assert clock.drain()
    before = clock.timed
    one_cycle(clock, device)
    assert clock.timed == before + 1, "the ring is usable again"


@given(every=st.integers(1, 7), cycles=st.integers(1, 60))
def test_sampling_times_one_in_every_with_its_gap(every: int, cycles: int) -> None:
    device = Device()
    clock = CycleClock(device.stamp, every=every)
    for _ in range(cycles):
        one_cycle(clock, device)
        device.work(0.2)
        device.run()
        clock.drain()
    assert clock.timed == (cycles + every - 1) // every
    assert clock.dropped == 0


def test_a_cycle_that_failed_is_dropped() -> None:
    device = Device()
    clock = CycleClock(device.stamp)
    clock.begin("draft")
    clock.mark("verify")
    clock.abandon()
    one_cycle(clock, device)
    clock.cut()
    device.run()
    (times,) = clock.drain()
    assert set(times.ms) == set(PARTS)


def test_marks_outside_a_cycle_and_beyond_the_ring_do_no_harm() -> None:
    device = Device()
    clock = CycleClock(device.stamp, marks=3)
    clock.mark("verify")
    clock.begin("draft")
    for _ in range(10):
        clock.mark("verify")
    clock.end()
    clock.cut()
    device.run()
    assert set(clock.drain()[0].ms) == {"draft", "verify"}


def test_break_even_of_a_public_report() -> None:
    """G7 (rtx6kpro#10): the accept length needed to win, from the phases."""
    assert breakeven.needed_from_phases(10.0, {"verify": 12.0, "draft": 2.0}) == pytest.approx(1.4)


def test_break_even_of_the_field_report() -> None:
    cycle = 29.0 / 0.969
    assert breakeven.needed(cycle, 12.15) == pytest.approx(2.46, abs=0.01)
    verdict = breakeven.judge(cycle, 12.15, 2.0)
    assert not verdict.wins and 1 - verdict.speedup == pytest.approx(0.19, abs=0.02)


def test_the_log_line_reads_as_promised() -> None:
    assert (
        breakeven.judge(3.4, 1.9, 2.04).text()
        == "cycle 3.40 ms, decode 1.90 ms: needs 1.79 accepted, gets 2.04: 1.14x"
    )


@pytest.mark.parametrize(("cycle", "decode"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, float("nan"))])
def test_times_that_cannot_be_are_refused(cycle: float, decode: float) -> None:
    with pytest.raises(breakeven.BreakEvenError):
        breakeven.needed(cycle, decode)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(1, 8))
def test_speculation_wins_exactly_above_the_break_even(cycle: float, decode: float, kept: float) -> None:
    verdict = breakeven.judge(cycle, decode, kept)
    assert verdict.wins == (verdict.speedup > 1)
    assert verdict.speedup == pytest.approx((kept / cycle) / (1 / decode))


def test_a_dear_verify_reverses_the_best_draft_length() -> None:
    rates = [0.7, 0.45, 0.3, 0.2]
    cheap = {1: 2.2, 2: 2.3, 3: 2.4, 4: 2.5}
    dear = {1: 2.6, 2: 4.0, 3: 5.5, 4: 7.0}
    assert breakeven.best_drafted(cheap, 1.9, rates)[0] == 4
    assert breakeven.best_drafted(dear, 1.9, rates)[0] == 1
    assert breakeven.best_drafted({1: 9.0, 2: 12.0}, 1.9, rates)[0] == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_rates_and_length_agree(counts: list[int]) -> None:
    histogram = accept.KeptHistogram(list(counts))
    rates = histogram.by_position()
    assert rates == sorted(rates, reverse=True)
    if histogram.cycles:
        assert 1 + sum(rates) == pytest.approx(histogram.length)
        assert breakeven.kept_with(rates, len(rates)) == pytest.approx(histogram.length)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=40))
def test_histogram_identities(cycles: list[tuple[int, bool]]) -> None:
    histogram = accept.KeptHistogram()
    tokens = 1
    for kept, _ in cycles:
        histogram.add(kept)
        tokens += kept
    assert accept.histogram_faults(histogram.counts, len(cycles), histogram.drafts, tokens) == []
    assert accept.histogram_faults(histogram.counts, len(cycles) + 1, histogram.drafts, tokens)
    assert accept.histogram_faults(histogram.counts, len(cycles), histogram.drafts + 1, tokens)


@pytest.mark.parametrize(
    ("accepted", "before", "finished", "kept"),
    [(3, 1, None, 3), (3, 1, 2, 1), (3, 1, 3, 2), (3, 1, 4, 3), (3, 5, 5, 0), (1, 0, 1, 1)],
)
def test_tokens_behind_the_end_are_not_kept(
    accepted: int, before: int, finished: int | None, kept: int
) -> None:
    assert accept.kept_tokens(accepted, before, finished) == kept


def feed(alarm: AcceptanceAlarm, windows: list[float], size: int = 64) -> list[str]:
    """Kinds of the alarms that windows of these mean draft counts raise."""
    raised = []
    for mean in windows:
        found = alarm.add(size, round(mean * size))
        if found:
            raised.append(found.kind)
    return raised


@pytest.mark.parametrize(
    ("windows", "kinds"),
    [
        ([0.0, 0.0, 0.01], [NEVER]),
        ([1.0, 1.1, 0.9], []),
        ([1.0, 0.02, 0.02, 1.0, 0.0], [LOST, LOST]),
        ([1.0, 0.15], [LOST]),
        ([0.2, 0.15, 0.3], []),
    ],
)
def test_the_alarm_speaks_once_when_the_state_changes(windows: list[float], kinds: list[str]) -> None:
    assert feed(AcceptanceAlarm(), windows) == kinds


def test_the_alarm_names_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    stats = Collector("cpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(64):
            stats.settle(1)
    assert "draft accepts almost nothing" in caplog.text and "--speculative-draft-model-path" in caplog.text


def test_a_baseline_is_interpolated_between_contexts_and_never_between_batches(tmp_path: Path) -> None:
    known = baseline.Baseline({(1, 1024): 1.9, (1, 16384): 2.3, (4, 1024): 3.0})
    known.save(tmp_path / "b.json")
    read = baseline.Baseline.load(tmp_path / "b.json")
    assert read.decode_ms(1, 100) == 1.9
    assert read.decode_ms(1, (1024 + 16384) // 2) == pytest.approx(2.1)
    assert read.decode_ms(1, 10**6) == 2.3
    assert read.decode_ms(2, 1024) is None


def test_a_broken_baseline_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"SGLANG_SPEC_BASELINE=.*b\.json"):
        baseline.Baseline.load(path)


def test_the_line_without_a_baseline_turns_the_comparison_round() -> None:
    window = Window()
    window.phases.add({**PARTS, "host_gap": 0.2})
    window.timed = 1
    window.kept.merge([1, 1, 1])
    text = line(window, None)
    assert "wins where a plain decode takes more than 1.70 ms" in text
    assert "kept by position 67% 33%" in text


def test_totals_of_a_request_are_a_difference() -> None:
    totals = PhaseTotals()
    totals.add({"verify": 10.0})
    start = totals.copy()
    totals.add({"verify": 2.0, "host_gap": 1.0})
    totals.add({"verify": 4.0})
    assert totals.since(start).mean() == {"verify": 3.0, "host_gap": 1.0}
