"""Custom logit processors in verify: every row, with the request as it would have looked there (E6)."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.speculative.semantics import processor_hooks
from sglang.srt.speculative.semantics.row_history import RequestAtRow, output_before_drafts, path_tokens

from .fakes import FakeBatch, FakeRequest, accept_chain, chain_input

VOCABULARY = 23


class BanLastTwo:
    """Bans the two newest output tokens and records what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any] | None]) -> torch.Tensor:
        assert len(logits) == len(parameters)
        for row, given in zip(logits, parameters, strict=True):
            assert given is not None
            request = given["__req__"]
            self.seen.append(list(request.output_ids))
            assert isinstance(request.output_ids + array("q", [1]), array)
            for token in request.output_ids[-2:]:
                row[token] = float("-inf")
        return logits


def batch_with(processor: BanLastTwo, *, overlap: bool = False) -> FakeBatch:
    requests = [FakeRequest([3, 4], max_new_tokens=50), FakeRequest([5], max_new_tokens=50)]
    requests[0].custom_logit_processor = "ban"
    parameters: dict[str, Any] = {"k": 1, "__req__": requests[0]}
    batch = FakeBatch(requests, overlap=overlap)
    batch.sampling_info = SimpleNamespace(
        has_custom_logit_processor=True,
        custom_logit_processor={1: (processor, torch.tensor([True, False]))},
        custom_params=[parameters, None],
        logit_bias=None,
    )
    return batch


def run(batch: FakeBatch, candidates: torch.Tensor, drawn: torch.Tensor, grammar: Any = None) -> torch.Tensor:
    logits = torch.zeros(candidates.numel(), VOCABULARY)
    output = SimpleNamespace(next_token_logits=logits)

    def sample(verify_input: Any, batch: Any, output: Any, mask: Any) -> Any:
        assert mask is None and batch.sampling_info.logit_bias is None
        return accept_chain(candidates, drawn)

    processor_hooks.verify(sample, chain_input(candidates), batch, output, grammar)
    return logits


def test_every_row_has_its_own_history() -> None:
    processor = BanLastTwo()
    candidates = torch.tensor([[4, 7, 8], [5, 7, 8]])
    logits = run(batch_with(processor), candidates, torch.zeros(2, 3, dtype=torch.long))
    assert processor.seen == [[3, 4], [3, 4, 7], [3, 4, 7, 8]]
    banned = [torch.isinf(row).nonzero().flatten().tolist() for row in logits]
    assert banned == [[3, 4], [4, 7], [7, 8], [], [], []]


def test_history_survives_a_host_that_lags_a_step() -> None:
    """Overlapped scheduling: the second verify starts before the first one's tokens are in the request."""
    processor = BanLastTwo()
    batch = batch_with(processor, overlap=True)
    batch.reqs[0].output_ids = array("q", [3])  # The prefill's token is not there yet either.
    batch.seq_lens = torch.tensor([3, 2])
    first = torch.tensor([[4, 7, 8], [5, 7, 8]])
    run(batch, first, torch.tensor([[7, 9, 9], [0, 0, 0]]))  # Commits 7 and 9.
    batch.seq_lens = torch.tensor([5, 3])
    processor.seen.clear()
    run(batch, torch.tensor([[9, 1, 2], [0, 1, 2]]), torch.zeros(2, 3, dtype=torch.long))
    assert processor.seen == [[3, 4, 7, 9], [3, 4, 7, 9, 1], [3, 4, 7, 9, 1, 2]]


def test_processors_come_after_grammar_and_bias() -> None:
    """Plain decoding's order: what a processor sets, a mask does not take back."""
    order: list[str] = []
    processor = BanLastTwo()
    batch = batch_with(processor)
    batch.sampling_info.logit_bias = torch.ones(2, VOCABULARY)
    grammar = SimpleNamespace(apply=lambda logits: order.append("mask"))
    logits = run(batch, torch.tensor([[4, 7, 8], [5, 7, 8]]), torch.zeros(2, 3, dtype=torch.long), grammar)
    assert order == ["mask"]
    assert logits[5].tolist() == [1.0] * VOCABULARY


def test_batches_without_processors_go_straight_through() -> None:
    batch = FakeBatch([FakeRequest(max_new_tokens=9)])
    batch.sampling_info = SimpleNamespace(has_custom_logit_processor=False)
    assert processor_hooks.verify(lambda *_: "untouched", None, batch, None) == "untouched"


def test_upstreams_row_form_hands_one_parameter_for_three_rows() -> None:
    """Negative control: upstream's own form for several rows has fewer parameters than rows."""
    batch = batch_with(BanLastTwo())
    info = batch.sampling_info

    class Info(SimpleNamespace):
        def __len__(self) -> int:
            return 2

    with pytest.raises(AssertionError):
        apply_custom_logit_processor(torch.zeros(6, VOCABULARY), Info(**vars(info)), num_tokens_in_batch=3)


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([[1, 2, 9]], [1, 2, 9]),
        ([[1, 2]], [1, 2, 9]),
        ([[1], [1, 2]], [1, 2, 9]),
        ([[1, 2, 3, 4], [1, 2]], [1, 2, 9]),
        ([[1, 2, 8]], None),
        ([[], [1]], None),
    ],
)
def test_record_that_fits(records: list[list[int]], expected: list[int] | None) -> None:
    assert output_before_drafts(records, bonus=9, committed=3) == expected


def test_unknown_history_is_an_error_that_names_the_request() -> None:
    batch = batch_with(BanLastTwo())
    batch.seq_lens = torch.tensor([30, 2])
    with pytest.raises(RuntimeError, match="request: no record of its output has the 29 tokens"):
        run(batch, torch.tensor([[4, 7, 8], [5, 7, 8]]), torch.zeros(2, 3, dtype=torch.long))


def test_path_and_view() -> None:
    assert path_tokens([9, 1, 2, 3], [True, False, True, True]) == [2, 3]
    request = FakeRequest([3], max_new_tokens=9)
    view = RequestAtRow(request, [3, 5, 6])
    assert view.seqlen == 5 and view.rid == request.rid and list(request.output_ids) == [3]
