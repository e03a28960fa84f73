"""Streaming intervals, hidden states and the room behind the context limit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.fork import fallbacks
from sglang.srt.managers.utils import compute_num_reserved_tokens
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.speculative.semantics import hidden_hooks, stream_hooks


def pieces(interval: int, runs: list[int], *, ours: bool) -> list[int]:
    """Output lengths at which a piece is sent, by upstream's rule with or without the fork's."""
    request = SimpleNamespace(send_token_offset=0, output_ids=[])
    sent = []
    for run in runs:
        request.output_ids += [0] * run
        length = len(request.output_ids)
        due = length % interval == 1 if interval > 1 else length % interval == 0
        if ours:
            due = stream_hooks.due(due, request, interval)
        if due:
            sent.append(length)
            request.send_token_offset = length
    return sent


def test_runs_jump_over_upstreams_lengths() -> None:
    """Negative control and fix: interval 3, a first run of 2, then runs of 3."""
    assert pieces(3, [2, 3, 3, 3], ours=False) == []
    assert pieces(3, [2, 3, 3, 3], ours=True) == [2, 5, 8, 11]


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_single_tokens_stream_as_before(interval: int) -> None:
    assert pieces(interval, [1] * 20, ours=True) == pieces(interval, [1] * 20, ours=False)


@pytest.mark.parametrize("interval", [2, 5])
@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_pieces_are_never_late(interval: int, run: int) -> None:
    sent = [0, *pieces(interval, [run] * 20, ours=True)]
    assert max(after - before for before, after in itertools.pairwise(sent)) < interval + run


@pytest.fixture
def returns_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_hooks, "_may_return", lambda: True)


def output_with(stored: torch.Tensor | None) -> Any:
    return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=stored))


def test_client_gets_the_last_layer(returns_states: None) -> None:
    final, packed = torch.randn(6, 8), torch.randn(6, 24)
    stored = hidden_hooks.keep_final(lambda *_: packed, None, final)
    assert stored is packed
    result = output_with(stored)
    seen: list[torch.Tensor] = []
    hidden_hooks.to_host(lambda r, *_: seen.append(r.logits_output.hidden_states), result, False, True)
    assert seen[0] is final


def test_draft_keeps_the_packed_states(returns_states: None) -> None:
    final, packed = torch.randn(6, 8), torch.randn(6, 24)
    result = output_with(hidden_hooks.keep_final(lambda *_: packed, None, final))
    hidden_hooks.to_host(lambda *_: None, result, False, False)
    assert result.logits_output.hidden_states is packed


def test_other_states_are_left_alone(returns_states: None) -> None:
    same = torch.randn(6, 8)
    result = output_with(hidden_hooks.keep_final(lambda *_: same, None, torch.randn(6, 8)))
    hidden_hooks.to_host(lambda *_: None, result, False, True)
    assert result.logits_output.hidden_states is same
    assert hidden_hooks.keep_final(lambda *_: None, None, same) is None
    fallbacks.reset()
    hidden_hooks.keep_final(lambda *_: torch.randn(2, 24), None, torch.randn(6, 8))
    assert fallbacks.snapshot() == {"run-hidden-states": {"states of the last token only": 1}}


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("width", [2, 3, 4, 8, 16, 64])
def test_a_run_at_the_context_limit_stays_in_its_row(width: int, page: int) -> None:
    """The largest reservation of a request at its last verify, in whole pages, fits the widened row."""
    context = 1021
    arguments = SimpleNamespace(
        speculative_algorithm="EAGLE3",
        speculative_num_steps=width - 1,
        speculative_eagle_topk=1,
        max_speculative_num_draft_tokens=width,
        page_size=page,
    )
    row = context + allocation_sizing.get_req_to_token_extra_context_len(arguments)
    committed = context - 2
    reserved = committed + allocation_sizing.get_alloc_reserve_per_decode(arguments)
    needed = -(-reserved // page) * page
    assert needed <= row
    stock = context + allocation_sizing.get_req_to_token_extra_context_len.__wrapped__(arguments)
    if page == 1 and width > 6:
        assert needed > stock, "negative control: upstream's row is too short here"


def test_plain_decoding_keeps_its_row() -> None:
    arguments = SimpleNamespace(
        speculative_algorithm=None, max_speculative_num_draft_tokens=None, page_size=16
    )
    assert allocation_sizing.get_req_to_token_extra_context_len(arguments) == 4


@pytest.mark.parametrize(("algorithm", "reserved"), [("EAGLE3", 0), ("EAGLE", 0), (None, 0)])
def test_the_context_is_as_long_as_without_speculation(algorithm: str | None, reserved: int) -> None:
    arguments = SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_eagle_topk=1,
        speculative_num_steps=2,
        max_speculative_num_draft_tokens=3,
    )
    assert compute_num_reserved_tokens(arguments) == reserved
    if algorithm:
        assert compute_num_reserved_tokens.__wrapped__(arguments) == 3, "negative control"
