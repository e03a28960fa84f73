"""The GPU's replay test dry: the same loop over two eager programs, with controls that it must notice."""

from __future__ import annotations

import pytest
import replays
import torch
from sglang.srt.speculative.cycle_graph import program, steps


@pytest.mark.parametrize("drawn", (False, True))
@pytest.mark.parametrize("shared", (True, False))
def test_the_loop_itself(shared: bool, drawn: bool) -> None:
    whole, plain = replays.make_pair(shared, drawn, 1, 1, "cpu")
    replays.settle(whole)
    mine = replays.Toy(whole, 1)
    ran = replays.compare(
        whole, plain, lambda: program.run(whole, steps, mine), steps, 120, limit_s=1200, every=7
    )
    assert ran == 120


@pytest.mark.parametrize("lost", ("relay", "extend"))
def test_control_a_step_that_is_left_out_is_noticed(lost: str) -> None:
    whole, plain = replays.make_pair(True, False, 1, 1, "cpu")
    replays.settle(whole)
    mine, turn = replays.Toy(whole, 1), iter(range(1000))

    def launch() -> None:
        kept = whole.relay.hidden.clone()
        program.run(whole, steps, mine)
        if next(turn) == 3:
            if lost == "relay":
                whole.relay.hidden.copy_(kept)
            else:
                whole.relay.lengths.add_(1)

    with pytest.raises(AssertionError):
        replays.compare(whole, plain, launch, steps, 40, limit_s=1200, every=1)


def test_the_limit_ends_it() -> None:
    whole, plain = replays.make_pair(True, False, 1, 1, "cpu")
    replays.settle(whole)
    mine = replays.Toy(whole, 1)
    assert (
        replays.compare(whole, plain, lambda: program.run(whole, steps, mine), steps, 10**6, limit_s=0.2)
        < 10**6
    )


def test_poison_is_gone_before_a_pass_looks_anything_up() -> None:
    whole, _ = replays.make_pair(True, False, 1, 1, "cpu")
    # Without the first empty cycle, the lookups of the passes' warm-up leave their tables.
    with pytest.raises((IndexError, RuntimeError)):
        replays.Toy(whole, 1).verify()
    replays.settle(whole)
    toy = replays.Toy(whole, 1)
    toy.draft()
    toy.verify()
    toy.extend()
    assert not torch.isnan(whole.verify.logits).any()
