"""A run of one H200 played again to the controller, step by step: a switch by a stretch of slow steps is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.speculative.auto.cells import PLAIN, SPECULATE
from sglang.srt.speculative.auto.controller import Controller, Verdict

# Requests that the bench sends before each timed one, in steps of decode; then the tokens that it times, and as many.
LEADS, EXTRA = (2, 8, 8), 8
# Context as a key sees it, batch, timed tokens; plain and cycle milliseconds as that run had them.
CASES = ((1100, 1, 400, 1.660, 2.04), (16500, 1, 300, 1.728, 2.15), (1100, 2, 200, 1.692, 2.044))
# That run's plain steps 27 before its probe of speculation, and the cycles after it.
SLOW_MS, SLOW_FROM, SLOW_STEPS, LATE_CYCLE_MS = 2.318, 3653, 27, 2.133


class Former(Controller):
    """The controller of that run: it leaves plain decode by the last steps alone."""

    def _calm_speedup(self, verdict: Verdict) -> float | None:
        return verdict.speedup


@dataclass
class Replay:
    """The bench's requests on one controller; nothing of a draft is ever accepted."""

    controller: Controller = field(default_factory=Controller)
    step: int = 0
    slow_from: int = SLOW_FROM

    def time(self, mode: str, plain: float, cycle: float) -> float:
        """Milliseconds of this step."""
        slow = self.slow_from <= self.step < self.slow_from + SLOW_STEPS
        if mode == PLAIN:
            return SLOW_MS if slow else plain
        return cycle if self.step < self.slow_from + SLOW_STEPS + 10 else LATE_CYCLE_MS

    def request(self, case: tuple[int, int, int, float, float], steps: int) -> list[str]:
        """The modes of one request. Times come a step late, none of the first step and none of the last."""
        context, batch, _, plain, cycle = case
        told: tuple[str, float] | None = None
        modes = []
        for index in range(steps):
            if told is not None:
                self.controller.took(told[0], batch, context, told[1])
            mode = self.controller.choose(batch, context)
            ms = self.time(mode, plain, cycle)
            if mode == SPECULATE:
                self.controller.kept(1.0, batch)
            told = (mode, ms) if index else None
            modes.append(mode)
            self.step += 1
        return modes

    def measure(self, case: tuple[int, int, int, float, float]) -> list[str]:
        """One measurement of the bench: the modes of its timed request."""
        for steps in LEADS:
            self.request(case, steps)
        return self.request(case, case[2] + EXTRA)


def timed(replay: Replay, rounds: int = 3) -> list[list[list[str]]]:
    """The modes of the timed requests by case and round, after each case ran once untimed."""
    for case in CASES:
        replay.measure(case)
    return [[replay.measure(case) for _ in range(rounds)] for case in CASES]


def test_a_switch_by_a_stretch_of_slow_steps_is_taken_back() -> None:
    """27 slow plain steps end with a request; the probe of speculation meets calm ones, and wins by them.

    The replay makes the steps that the run counted until then. After it the run made 208 cycles of 208 steps, since the
    slow stretch stayed the figure of plain decode for as long as speculation ran.
    """
    replay = Replay(Former())
    short, long, (first, second, third) = timed(replay)
    assert sum(modes.count(SPECULATE) for modes in short) == 8, "one probe, as counted"
    assert not any(modes.count(SPECULATE) for modes in long)
    assert first.count(SPECULATE) == 0
    assert second[:202] == [PLAIN] * 202 and second[202:] == [SPECULATE] * 6, "the probe, as counted"
    assert third[0] == SPECULATE, "which won in an untimed request"
    assert third.count(SPECULATE) < 70 and third[-100:] == [PLAIN] * 100
    assert replay.controller.mode == PLAIN


def test_by_the_calm_level_the_stretch_is_no_reason() -> None:
    """The same requests and the same stretch: nothing but the probes that a calm run has."""
    replay = Replay()
    two = timed(replay)[2]
    assert sum(modes.count(SPECULATE) for modes in two) <= 8
    assert replay.controller.switches == 1 and replay.controller.mode == PLAIN


def test_without_the_stretch_it_stays_plain() -> None:
    """Negative control: the same requests without slow steps never leave plain decode but for probes."""
    replay = Replay(slow_from=1 << 40)
    two = timed(replay)[2]
    assert sum(modes.count(SPECULATE) for modes in two) <= 8
    assert replay.controller.switches == 1 and replay.controller.mode == PLAIN


def test_speculation_that_came_back_rightly_stays_after_the_check() -> None:
    """The check costs an epoch of plain decode, once, where speculation wins by less than 1.5; above that none."""
    for kept, checks in ((1.5, 1), (2.6, 0)):
        controller = Controller()

        def steps(accepted: float, count: int, controller: Controller = controller) -> None:
            for _ in range(count):
                mode = controller.choose(1, 1000)
                controller.took(mode, 1, 1000, 1.7 if mode == PLAIN else 2.1)
                if mode == SPECULATE:
                    controller.kept(accepted, 1)

        steps(1.0, 2000)
        while controller.mode == PLAIN:
            steps(kept, 8)
        controller.drain()
        steps(kept, 2000)
        events = controller.drain()
        assert [(event.kind, event.mode) for event in events] == [("probe", PLAIN)] * checks
        assert controller.mode == SPECULATE
