"""The analytical model: validated where something was measured, and monotonic where nothing was."""

from __future__ import annotations

import pytest

from benchmark.model import check
from benchmark.model.constants import table
from benchmark.model.hardware import MACHINES
from benchmark.model.predict import FLOOR, FORK, FORK_ATTENTION, UPSTREAM, kimi, predict, reference_slice

TOLERANCE = 0.15


@pytest.mark.parametrize("item", check.slice_comparisons(), ids=lambda item: item.name)
def test_the_slice_is_predicted_within_15_percent(item: check.Comparison) -> None:
    assert abs(item.error) < TOLERANCE


@pytest.mark.parametrize("item", check.field_comparisons(), ids=lambda item: item.name)
def test_the_field_report_is_reproduced(item: check.Comparison) -> None:
    assert abs(item.error) < TOLERANCE


def test_its_break_even_is_the_reported_one() -> None:
    guess = predict(kimi("rtxpro6000x8"), UPSTREAM, check.mean_context())
    assert guess.verdict(2.0).needed == pytest.approx(2.42, rel=TOLERANCE) and not guess.verdict(2.0).wins


def test_the_verify_that_nobody_could_reproduce_is_that_of_short_answers() -> None:
    assert 50 < check.context_of_verify(check.FIELD_ODD_VERIFY_MS) < 600


def test_every_constant_says_where_it_comes_from() -> None:
    constants = table()
    assert len(constants) > 20
    for name, constant in constants:
        assert constant.kind in ("measured", "cited", "assumed"), name
        assert len(constant.source) > 15 and constant.unit, name


@pytest.mark.parametrize("machine", [name for name in MACHINES if name != "h200"])
@pytest.mark.parametrize("context", [0, 1024, 16384, 131072])
def test_each_step_of_the_fork_is_no_slower(machine: str, context: int) -> None:
    cycles = [
        predict(kimi(machine), path, context).cycle_ms for path in (UPSTREAM, FORK_ATTENTION, FORK, FLOOR)
    ]
    assert cycles == sorted(cycles, reverse=True)


def test_experts_of_a_verify_cost_more_unless_tokens_share_them() -> None:
    independent = predict(kimi("rtxpro6000x8", repeat=0.0), FORK, 1024).verify_parts_ms["experts"]
    shared = predict(kimi("rtxpro6000x8", repeat=1.0), FORK, 1024).verify_parts_ms["experts"]
    assert 1.5 < independent / shared < 3.0


@pytest.mark.parametrize("drafted", [1, 2, 3, 4])
def test_time_grows_with_context_and_draft_length(drafted: int) -> None:
    deployment = reference_slice()
    times = [predict(deployment, UPSTREAM, context, drafted).cycle_ms for context in (0, 1000, 10000, 100000)]
    assert times == sorted(times)
    assert (
        predict(deployment, UPSTREAM, 1000, drafted + 1).cycle_ms
        > predict(deployment, UPSTREAM, 1000, drafted).cycle_ms
    )


def test_phases_are_the_cycle() -> None:
    guess = predict(kimi("h200x8"), FORK, 16384)
    assert sum(guess.phases_ms.values()) == pytest.approx(guess.cycle_ms)
    # A verify is its parts and the launches before its graph.
    assert sum(guess.verify_parts_ms.values()) == pytest.approx(guess.phases_ms["verify"], rel=0.02)
