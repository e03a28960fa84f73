"""Streaming intervals, hidden states and the room behind the context limit."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.fork import fallbacks
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import compute_num_reserved_tokens
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.speculative.eagle_worker_common import _compact_accept_to_front
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


def graph_runner(final: torch.Tensor, *, backend: Any = None) -> Any:
    """What ``DecodeCudaGraphRunner.execute`` needs of itself: a captured batch of 4, two rows live."""
    packed = torch.randn(final.shape[0], 24)
    captured = LogitsProcessorOutput(
        next_token_logits=torch.randn(final.shape[0], 5),
        hidden_states=hidden_hooks.keep_final(lambda *_: packed, None, final),
    )
    backend = backend or SimpleNamespace(
        _outputs={4: captured}, replay=lambda *_: captured, replay_session=contextlib.nullcontext
    )
    return SimpleNamespace(
        model_runner=SimpleNamespace(device_timer=None, model_config=SimpleNamespace(hidden_size=8)),
        backend=backend,
        load_batch=lambda *_: None,
        is_dllm=False,
        raw_num_token=2,
        _replay_graph_key=4,
    )


VERIFY_BATCH = SimpleNamespace(
    forward_mode=SimpleNamespace(
        name="TARGET_VERIFY", is_decode=lambda: False, is_target_verify=lambda: False
    )
)


def test_behind_a_graph_the_client_gets_the_last_layer(returns_states: None) -> None:
    """Upstream's own replay slices what was captured; the slice must still name the last layer."""
    final = torch.randn(4, 8)
    stock = inspect.unwrap(DecodeCudaGraphRunner.execute)
    runner = graph_runner(final)
    lost = stock(runner, VERIFY_BATCH)
    assert not hasattr(lost.hidden_states, "run_final_states")
    output = hidden_hooks.replayed(stock, runner, VERIFY_BATCH)
    assert output.hidden_states.shape == (2, 24)
    expected = final[:2].clone()
    # The next replay, or the draft's, overwrites what the graph owns.
    final.fill_(float("nan"))
    seen: list[torch.Tensor] = []
    result = SimpleNamespace(logits_output=output)
    hidden_hooks.to_host(lambda r, *_: seen.append(r.logits_output.hidden_states), result, False, True)
    assert torch.equal(seen[0], expected)


def test_a_graph_that_does_not_name_its_last_layer_is_reported(returns_states: None) -> None:
    runner = graph_runner(torch.randn(4, 8))
    runner.backend._outputs = {}
    fallbacks.reset()
    hidden_hooks.replayed(inspect.unwrap(DecodeCudaGraphRunner.execute), runner, VERIFY_BATCH)
    assert fallbacks.snapshot() == {
        "run-hidden-states": {"the graph's output does not name its last layer": 1}
    }


def test_behind_a_prefill_graph_the_client_gets_the_last_layer(returns_states: None) -> None:
    final = torch.randn(6, 8)
    output = LogitsProcessorOutput(
        next_token_logits=torch.randn(6, 5),
        hidden_states=hidden_hooks.keep_final(lambda *_: torch.randn(6, 24), None, final),
    )
    runner = SimpleNamespace(
        raw_num_tokens=5,
        raw_bs=1,
        _is_full_backend=False,
        model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_speculative=lambda: True)),
    )
    cut = hidden_hooks.trimmed(inspect.unwrap(PrefillCudaGraphRunner._trim_logits_output), runner, output)
    result = SimpleNamespace(logits_output=cut)
    hidden_hooks.to_host(lambda *_: None, result, False, True)
    assert torch.equal(cut.hidden_states, final[:5])


def test_the_accepted_path_of_a_tree_moves_the_last_layer_too(returns_states: None) -> None:
    final, packed = torch.randn(8, 8), torch.randn(8, 24)
    stored = hidden_hooks.keep_final(lambda *_: packed, None, final)
    accepted = torch.tensor([[0, 2, -1], [4, 7, -1]])
    front = hidden_hooks.moved(
        inspect.unwrap(_compact_accept_to_front), stored, accepted, 2, num_draft_tokens=4
    )
    result = output_with(front)
    hidden_hooks.to_host(lambda *_: None, result, False, True)
    rows = result.logits_output.hidden_states
    assert torch.equal(rows[[0, 1, 4, 5]], final[[0, 2, 4, 7]])


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
