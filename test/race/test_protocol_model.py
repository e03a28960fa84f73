"""Every order of events of the flag protocol, for 2 and 3 ranks; and the same with one protection off at a time."""

from __future__ import annotations

from itertools import product

import pytest
from model import Result, Scenario, check
from sglang.srt.distributed.one_shot.protocol import Safety, Variant

ONE, TWO = Variant.ONE_SHOT, Variant.TWO_STAGE


def sound(scenario: Scenario) -> Result:
    """The scenario has no wrong read and no rank that waits for ever."""
    result = check(scenario)
    assert not result.wrong, "\n".join(result.trace)
    assert not result.stuck
    return result


@pytest.mark.parametrize(
    "variants", list(product([ONE, TWO], repeat=4)), ids=lambda v: "-".join(x.value for x in v)
)
def test_two_ranks_four_epochs_of_any_mix(variants: tuple[Variant, ...]) -> None:
    assert sound(Scenario(2, variants)).states > 100


def test_three_ranks_three_epochs() -> None:
    assert sound(Scenario(3, [ONE] * 3)).states > 10_000


def test_three_ranks_two_stages_between_one_shots() -> None:
    assert sound(Scenario(3, [ONE, TWO, ONE])).states > 10_000


CONTROLS = {
    "one buffer": (Safety(buffers=1), False, "holds epoch 2"),
    "flag before data": (Safety(data_first=False), False, "holds epoch 0"),
    "no release": (Safety(release=False), False, "holds epoch 0"),
    "no acquire": (Safety(acquire=False), False, "holds epoch 0"),
    "release does not cover reads": (Safety(), True, "holds epoch 3"),
}


@pytest.mark.parametrize(
    ("ranks", "variants"), [(2, [ONE] * 3), (3, [ONE] * 3), (2, [ONE, ONE, TWO]), (2, [ONE, TWO, ONE])]
)
@pytest.mark.parametrize("name", CONTROLS)
def test_without_any_one_protection_a_wrong_read_is_found(
    name: str, ranks: int, variants: list[Variant]
) -> None:
    safety, late_reads, words = CONTROLS[name]
    result = check(Scenario(ranks, variants, safety, late_reads=late_reads))
    assert words in result.wrong
    assert result.trace[-1] == result.wrong


def test_the_second_stage_is_an_end_barrier_of_the_first() -> None:
    """Two-stage epochs alone would be safe with one buffer; beside one-shot epochs they are not."""
    sound(Scenario(2, [TWO] * 4, Safety(buffers=1)))
    assert check(Scenario(2, [TWO, ONE, TWO], Safety(buffers=1))).wrong


@pytest.mark.parametrize(("bits", "wrong"), [(64, ""), (3, "holds epoch 0")])
def test_narrow_flags_let_a_rare_second_stage_read_too_early(bits: int, wrong: str) -> None:
    """Five one-shot epochs and a two-stage one: with 3 bits the second stage's first flag looks like one ahead."""
    result = check(Scenario(2, [*[ONE] * 5, TWO], Safety(flag_bits=bits)))
    assert (wrong in result.wrong) if wrong else not (result.wrong or result.stuck)


def test_a_lost_flag_leaves_its_reader_waiting_until_the_next_epochs_flag() -> None:
    last = check(Scenario(3, [ONE] * 3, lost=(2, 0, 3)))
    assert not last.wrong
    assert last.stuck == {(0, 2, 3, 0)}
    # Flags only grow and both buffers are whole, so a later flag of the same peer stands for the lost one.
    sound(Scenario(3, [ONE] * 3, lost=(2, 0, 2)))


def test_a_dead_rank_is_what_everyone_waits_for() -> None:
    result = check(Scenario(3, [TWO, ONE], dead=(1, 2)))
    assert {(rank, peer, epoch) for rank, peer, epoch, _ in result.stuck} == {(0, 1, 2), (2, 1, 2)}
