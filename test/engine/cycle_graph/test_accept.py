"""Acceptance along a chain: properties, and upstream's own tree walk as the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.speculative.cycle_graph.accept import (
    FIXED_TOKEN,
    accept_chain,
    good_prefix,
    simulate,
)


@st.composite
def chains(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates and choices over few tokens, so that runs of every length occur."""
    batch, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    token = st.integers(0, 2)
    rows = st.lists(st.lists(token, min_size=width, max_size=width), min_size=batch, max_size=batch)
    return torch.tensor(draw(rows)), torch.tensor(draw(rows))


def walk(candidates: list[int], chosen: list[int]) -> list[int]:
    """One chain, token by token, as plain decoding would have made them."""
    run = []
    for row, token in enumerate(chosen):
        run.append(token)
        if row + 1 >= len(candidates) or candidates[row + 1] != token:
            break
    return run


@given(chains())
@settings(deadline=None, max_examples=200)
def test_runs_are_those_of_a_walk(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    candidates, chosen = case
    found = accept_chain(candidates, chosen)
    for row in range(len(candidates)):
        run = walk(candidates[row].tolist(), chosen[row].tolist())
        assert int(found.kept[row]) == len(run)
        assert found.tokens[row].tolist() == run + [0] * (candidates.shape[1] - len(run))
        assert int(found.bonus[row]) == run[-1]


@given(chains())
@settings(deadline=None, max_examples=50)
def test_equals_upstreams_walk(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    portable = pytest.importorskip("sgl_kernel_portable.draft_tree")
    candidates, chosen = case
    batch, width = candidates.shape
    index = torch.arange(batch * width).view(batch, width)
    following = torch.arange(1, width + 1).repeat(batch, 1)
    following[:, -1] = -1
    predicts = torch.zeros(batch * width, dtype=torch.int32)
    accepted = torch.full((batch, width), -1, dtype=torch.int32)
    count = torch.empty(batch, dtype=torch.int32)
    portable.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=candidates,
        retrive_index=index,
        retrive_next_token=following,
        retrive_next_sibling=torch.full_like(index, -1),
        target_predict=chosen,
    )
    found = accept_chain(candidates, chosen)
    assert torch.equal(found.kept, count + 1)
    assert torch.equal(found.tokens.flatten(), predicts)


@given(chains(), st.data())
@settings(deadline=None, max_examples=100)
def test_good_prefix_stops_at_the_first_bad_row(
    case: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    candidates, chosen = case
    kept = accept_chain(candidates, chosen).kept
    values = st.sampled_from([0.0, 3.0, float("inf"), float("-inf")])
    shape = candidates.shape
    maxima = torch.tensor(data.draw(st.lists(values, min_size=shape.numel(), max_size=shape.numel()))).view(
        shape
    )
    for row, good in enumerate(good_prefix(maxima, kept).tolist()):
        expected = 0
        while expected < int(kept[row]) and abs(float(maxima[row, expected])) < float("inf"):
            expected += 1
        assert good == expected


@given(chains(), st.data())
@settings(deadline=None, max_examples=50)
def test_simulated_lengths(case: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    candidates, chosen = case
    length = data.draw(st.integers(1, candidates.shape[1]))
    fixed = simulate(candidates, chosen, length, real_tokens=False)
    assert fixed.kept.tolist() == [length] * len(candidates)
    assert set(fixed.tokens.flatten().tolist()) == {FIXED_TOKEN}
    real = simulate(candidates, chosen, length, real_tokens=True)
    assert torch.equal(real.tokens[:, : length - 1], candidates[:, 1:length].int())
    assert torch.equal(real.bonus, chosen[:, length - 1])
    # What lies behind the pretended path is the real verify's.
    assert torch.equal(real.tokens[:, length:], accept_chain(candidates, chosen).tokens[:, length:])
