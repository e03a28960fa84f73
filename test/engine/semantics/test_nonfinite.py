"""Non-finite rows end their own request and no other (A12)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.semantics import nonfinite_hooks
from sglang.srt.speculative.semantics.nonfinite import bad_rows, good_tokens

from .fakes import FakeBatch, FakeRequest, accept_chain, chain_input

BAD = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("value", BAD)
def test_whole_rows(value: str, row: int) -> None:
    logits = torch.randn(3, 1009)
    logits[row] = BAD[value]
    assert bad_rows(logits).tolist() == [i == row for i in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_single_entries(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1009).to(dtype)
    logits[0, 1008] = float("nan")
    logits[1, 0] = float("inf")
    logits[2, 1:] = float("-inf")
    assert bad_rows(logits).tolist() == [True, True, False, False]


def test_only_accepted_rows_count() -> None:
    bad = torch.tensor([False, False, True, True, False, False, False, True, False])
    accepted = torch.tensor([[0, 1, -1], [3, 4, 5], [6, 7, 8]])
    assert good_tokens(bad, accepted).tolist() == [2, 0, 1]
    assert good_tokens(torch.zeros(9, dtype=torch.bool), accepted).tolist() == [2, 3, 3]


def step(bad_row: int | None, run_row_values: str = "nan") -> tuple[list[FakeRequest], list[list[int]], Any]:
    """One verify of two requests with three accepted tokens each; one row of the first may be bad."""
    requests = [FakeRequest([4, 4], max_new_tokens=50) for _ in range(2)]
    batch = FakeBatch(requests)
    batch.sampling_info = SimpleNamespace(is_all_greedy=True)
    logits = torch.randn(6, 31)
    if bad_row is not None:
        logits[bad_row] = BAD[run_row_values]
    output = SimpleNamespace(next_token_logits=logits)
    candidates = torch.tensor([[4, 7, 8], [4, 7, 8]])
    drawn = torch.tensor([[7, 8, 9], [7, 8, 9]])
    nonfinite_hooks.verify(lambda *_: accept_chain(candidates, drawn), chain_input(candidates), batch, output)
    result = SimpleNamespace(
        logits_output=output, num_correct_drafts=4, num_correct_drafts_per_req_cpu=[2, 2]
    )

    def original(*_: Any) -> list[list[int]]:
        for request in requests:
            request.kv_committed_len += 3
            request.spec_num_correct_drafts += 2
            request.spec_verify_ct += 1
            request.update_spec_correct_drafts_histogram(2)
        return [[7, 8, 9], [7, 8, 9]]

    return requests, nonfinite_hooks.resolve_tokens(original, None, result, batch), result


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_run_is_cut_before_the_bad_row(row: int, value: str) -> None:
    requests, runs, _ = step(row, value)
    assert runs == [[7, 8, 9][:row], [7, 8, 9]]
    request, neighbour = requests
    assert neighbour.to_finish is None
    request.output_ids.extend(runs[0])
    request.update_finish_state(len(runs[0]))
    reason = request.finished_reason.to_json()
    assert reason["type"] == "abort" and reason["status_code"] == 500
    assert "NaN or infinite" in reason["message"] and f"after {2 + row} output tokens" in reason["message"]
    assert request.kv_committed_len == 3 + row
    assert sum(request.spec_correct_drafts_histogram) == request.spec_verify_ct


def test_good_rows_pass() -> None:
    requests, runs, _ = step(None)
    assert runs == [[7, 8, 9], [7, 8, 9]]
    assert all(request.to_finish is None for request in requests)


@pytest.mark.parametrize(("limit", "aborted"), [(9, True), (1, True), (0, False)])
@pytest.mark.parametrize("greedy", [True, False])
def test_prefill_and_plain_decode(greedy: bool, limit: int, aborted: bool) -> None:
    """The sampler is handed a row it can draw from, and the request is aborted when its result is read.

    Unless it wants no token: nothing is chosen from its row, and only its KV is not shared.
    """
    logits = torch.randn(3, 17)
    logits[1] = float("nan")
    info = SimpleNamespace(is_all_greedy=greedy)
    output = SimpleNamespace(next_token_logits=logits)

    def sampler(module: Any, output: Any, info: Any) -> torch.Tensor:
        guarded = nonfinite_hooks.guard_logits(
            lambda m, logits, i: logits, module, output.next_token_logits, info
        )
        assert greedy or torch.isfinite(guarded).all()
        return guarded.argmax(-1)

    nonfinite_hooks.sample(sampler, None, output, info)
    requests = [FakeRequest([], max_new_tokens=limit) for _ in range(3)]
    for request in requests:
        request.inflight_middle_chunks = 0  # type: ignore[attr-defined]
    result = SimpleNamespace(logits_output=output, copy_done=None)
    seen: list[list[bool]] = []

    def process(processor: Any, batch: Any, result: Any) -> None:
        seen.append([r.to_finish is not None for r in batch.reqs])

    nonfinite_hooks.process_single(process, None, FakeBatch(requests), result)
    assert seen == [[False, aborted, False]]
    assert [getattr(request, "run_bad_rows", False) for request in requests] == [False, True, False]


def test_what_tells_bad_rows_leaves_with_the_result() -> None:
    """Copied before ``copy_done`` is recorded, not on the way through the sampler."""
    output = step(1)[2].logits_output
    told = output.run_good_tokens
    order: list[Any] = []
    result = SimpleNamespace(logits_output=output)
    nonfinite_hooks.copy_to_host(lambda r, *rest: order.append((r, rest)), result, False, True)
    assert order == [(result, (False, True))]
    assert output.run_good_tokens.tolist() == told.tolist()


def test_maxima_of_an_earlier_step_are_not_used_again() -> None:
    info = SimpleNamespace(is_all_greedy=True)
    nonfinite_hooks.guard_logits(lambda m, logits, i: logits, None, torch.full((1, 3), float("nan")), info)
    first, second = SimpleNamespace(), SimpleNamespace()
    for output in (first, second):
        nonfinite_hooks.sample(lambda *_: torch.zeros(1), None, output, info)
    assert hasattr(first, "run_row_maxima") and not hasattr(second, "run_row_maxima")


def test_kv_of_an_aborted_request_is_not_shared() -> None:
    inserted: list[bool] = []
    request, clean = step(0)[0]
    for each in (request, clean):
        nonfinite_hooks.release(lambda r, t, i: inserted.append(i), each, None)
    assert inserted == [False, True]
