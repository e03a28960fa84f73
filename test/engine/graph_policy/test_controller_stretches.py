"""Stretches in which the host slows plain steps alone: they are no reason to leave plain decode, and cost no more than it.

The times are those of one H200 with a batch of two: a plain step needs nearly as long on the host as on the device, so a
disturbance shows there, while a cycle, longer on the device, hides it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from sglang.srt.speculative.auto.cells import LONG, PLAIN, SPECULATE, Cells, Samples
from sglang.srt.speculative.auto.controller import Controller, Verdict

CALM_MS, SLOW_MS, CYCLE_MS = 1.70, 2.30, 2.13
BATCH, CONTEXT, STEPS = 2, 1000, 12_000
BAR = 1.05
# Steps of a request, and the steps in which the modes are still found out.
REQUEST, WARM = 200, 1000


@dataclass
class Stretches:
    """A world of calm steps with slow stretches between.

    Attributes:
        seed: of stretches and noise.
        slow_ms: a plain step of a stretch.
        slow: shortest and longest stretch, steps.
        calm: the same of what lies between.
        accept: tokens a cycle keeps.
    """

    seed: int
    slow_ms: float = SLOW_MS
    slow: tuple[int, int] = (20, 60)
    calm: tuple[int, int] = (150, 500)
    accept: float = 1.0

    def plain_ms(self, steps: int) -> list[float]:
        """Milliseconds of every step, were all of them plain."""
        draw = random.Random(self.seed)
        found: list[float] = []
        while len(found) < steps:
            for ms, (least, most) in ((CALM_MS, self.calm), (self.slow_ms, self.slow)):
                found += [ms * draw.uniform(0.985, 1.02) for _ in range(draw.randint(least, most))]
        return found[:steps]


@dataclass
class Lived:
    """What came of a run.

    Attributes:
        over_plain: its time a token over plain decode's in the same world.
        worst_request: the same of the worst request, once the modes are known.
        speculated: share of the steps that speculated.
        switches: of the mode.
    """

    over_plain: float
    worst_request: float
    speculated: float
    switches: int


def live(world: Stretches, steps: int = STEPS, controller: Controller | None = None) -> Lived:
    """Drive a controller; times come a step late."""
    found = controller or Controller()
    draw = random.Random(world.seed + 1)
    spent = plain = tokens = 0.0
    speculated, worst, request = 0, 0.0, [0.0, 0.0, 0.0]
    told: tuple[str, float] | None = None
    for step, ms in enumerate(world.plain_ms(steps)):
        if told is not None:
            found.took(told[0], BATCH, CONTEXT, told[1])
        mode = found.choose(BATCH, CONTEXT)
        kept = 1.0
        if mode == SPECULATE:
            kept = int(world.accept) + (draw.random() < world.accept % 1)
            told = mode, CYCLE_MS * draw.uniform(0.99, 1.02)
            found.kept(kept, BATCH)
            speculated += 1
        else:
            told = mode, ms
        spent, tokens, plain = spent + told[1], tokens + kept, plain + ms
        request = [one + more for one, more in zip(request, (told[1], kept, ms), strict=True)]
        if step % REQUEST == REQUEST - 1:
            if step > WARM:
                worst = max(worst, request[0] / request[1] / (request[2] / REQUEST))
            request = [0.0, 0.0, 0.0]
    return Lived((spent / tokens) / (plain / steps), worst, speculated / steps, found.switches)


class Former(Controller):
    """A controller that goes by the last plain steps alone."""

    def _calm_speedup(self, verdict: Verdict) -> float | None:
        return verdict.speedup


@pytest.mark.parametrize(
    "changes", [{}, {"calm": (60, 150)}, {"slow": (60, 180)}, {"slow_ms": 3.0}], ids=["seen", "dense", "long", "slower"]
)  # fmt: skip
def test_plain_decode_is_not_left_for_a_stretch_of_slow_steps(changes: dict[str, Any]) -> None:
    """Probes included, no request pays more than the bar, and nothing switches but the first time."""
    for seed in range(6):
        lived = live(Stretches(seed, **changes))
        assert lived.worst_request <= BAR and lived.over_plain <= 1.01
        assert lived.switches == 1 and lived.speculated < 0.01


def test_the_last_steps_alone_would_leave_it() -> None:
    """Negative control: long stretches take the former rule to speculation, and requests pay more than the bar."""
    former = [live(Stretches(seed, slow=(60, 180)), controller=Former()) for seed in range(6)]
    assert max(lived.worst_request for lived in former) > 1.1
    assert max(lived.switches for lived in former) > 1


@pytest.mark.parametrize("accept", [1.6, 2.5])
def test_speculation_that_wins_comes_back_through_stretches_as_soon_as_before(accept: float) -> None:
    """What keeps more tokens wins against calm steps as well: the rule takes no part in it."""
    taken = []
    for controller in (Former(), Controller()):
        live(Stretches(3), 2000, controller)
        assert controller.mode == PLAIN
        live(Stretches(3, accept=accept), 6000, controller)
        assert controller.mode == SPECULATE
        taken.append(controller.switches)
    assert taken[0] >= taken[1] == 2


def test_plain_decode_that_got_slower_for_good_is_left() -> None:
    """No stretch any more: after three quarters of the longer window the level itself has moved."""
    controller = Controller()
    live(Stretches(5), 1000, controller)
    assert controller.mode == PLAIN
    live(Stretches(5, slow=(6000, 6000), calm=(0, 0)), 6000, controller)
    assert controller.mode == SPECULATE and controller.switches == 2


def test_the_calm_level_is_the_lower_quartile() -> None:
    samples = Samples()
    for count, expected in ((3, None), (1, 1.0), (252, 1.0)):
        for _ in range(count):
            samples.add(1.0, 0)
        assert samples.calm_ms == expected
    for _ in range(LONG * 3 // 4):
        samples.add(2.0, 0)
    assert samples.ms == 2.0 and samples.calm_ms == 1.0
    samples.add(2.0, 0)
    assert samples.calm_ms == 2.0
    cells = Cells()
    cells.renew(PLAIN, (1, 10), [3.0] * 5, 1)
    renewed = cells.own(PLAIN, (1, 10))
    assert renewed is not None and renewed.calm_ms == 3.0
