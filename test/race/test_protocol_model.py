"""Every order of events of both protocols, for 2 and 3 ranks; and the same with one protection off at a time."""

from __future__ import annotations

from itertools import product

import pytest
from model import Result, Scenario, check
from sglang.srt.distributed.one_shot.protocol import Safety, Variant

ONE, TWO, PACKETS = Variant.ONE_SHOT, Variant.TWO_STAGE, Variant.PACKETS


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


@pytest.mark.parametrize(("words", "states"), [(1, 40), (2, 400), (3, 4000)])
def test_packets_of_two_ranks_four_epochs(words: int, states: int) -> None:
    """No flag, no fence, no barrier: each thread waits for its own word only."""
    assert sound(Scenario(2, [PACKETS] * 4, words=words)).states > states


def test_packets_of_three_ranks_four_epochs() -> None:
    assert sound(Scenario(3, [PACKETS] * 4)).states > 5_000


@pytest.mark.slow  # two minutes
def test_packets_of_three_ranks_with_two_threads_each() -> None:
    assert sound(Scenario(3, [PACKETS] * 3, words=2)).states > 1_000_000


@pytest.mark.parametrize(
    "variants",
    [mix for mix in product([ONE, TWO, PACKETS], repeat=4) if PACKETS in mix],
    ids=lambda v: "-".join(x.value for x in v),
)
def test_packets_between_calls_with_flags(variants: tuple[Variant, ...]) -> None:
    sound(Scenario(2, variants))


PACKET_CONTROLS = {
    # The reader asks for its own epoch: where data was overwritten it waits for ever, and takes nothing wrong.
    "one buffer": (Safety(buffers=1), "", True),
    "kernels overlap": (Safety(kernel_order=False), "", True),
    # The epoch without its data, and the data of an earlier use.
    "torn": (Safety(whole=False), "holds epoch 0", False),
    "any epoch": (Safety(own_epoch=False), "holds epoch 1", False),
    "one buffer, any epoch": (Safety(buffers=1, own_epoch=False), "holds epoch 1", False),
}


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        (name, ranks, words)
        for name in PACKET_CONTROLS
        for ranks, words in ((2, 1), (2, 2), (3, 1))
        if not (name == "kernels overlap" and ranks == 3)  # too many orders, and two ranks show it
    ],
)
def test_packets_without_any_one_protection_fail(name: str, ranks: int, words: int) -> None:
    safety, sentence, stuck = PACKET_CONTROLS[name]
    result = check(Scenario(ranks, [PACKETS] * 3, safety, words=words))
    assert sentence in result.wrong and bool(result.wrong) is bool(sentence)
    assert bool(result.stuck) is stuck


def test_a_lost_packet_is_waited_for_by_its_reader_and_nobody_passes_it() -> None:
    """Flags of later epochs stand for a lost one; packets do not: the data was in them."""
    result = check(Scenario(3, [PACKETS] * 3, lost=(2, 0, 2)))
    assert not result.wrong
    assert (0, 2, 2, 0) in result.stuck
    assert {epoch for _, _, epoch, _ in result.stuck} == {2, 3}


def test_a_dead_rank_is_what_everyone_waits_for_in_packets() -> None:
    result = check(Scenario(3, [TWO, PACKETS], dead=(1, 2)))
    assert {(rank, peer, epoch) for rank, peer, epoch, _ in result.stuck} == {(0, 1, 2), (2, 1, 2)}
