"""Every run ends where plain decoding would have ended it (E1, E4, G1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.speculative.semantics import run_end_hooks
from sglang.srt.speculative.semantics.accounting import move_in_histogram
from sglang.srt.speculative.semantics.run_end import EndRules, RunEnd, find_run_end

from .fakes import EOS, VOCABULARY, FakeBatch, FakeRequest

STOP = 12


def outcome(request: FakeRequest) -> tuple[Any, list[int]]:
    reason = None if request.finished_reason is None else request.finished_reason.to_json()
    return reason, list(request.output_ids_through_stop)


def plain(request: FakeRequest, run: list[int]) -> tuple[Any, list[int]]:
    for token in run:
        request.output_ids.append(token)
        request.update_finish_state(1)
        if request.finished():
            break
    return outcome(request)


def as_run(request: FakeRequest, run: list[int]) -> tuple[Any, list[int]]:
    """What upstream does with a run, after the fork's cut."""
    kept = run[: run_end_hooks.kept_tokens(request, run)]
    request.output_ids.extend(kept)
    request.update_finish_state(len(kept))
    return outcome(request)


@pytest.mark.parametrize("width", [3, 6])
@pytest.mark.parametrize(
    ("output", "run", "parameters", "expected"),
    [
        ([], [10, 11, STOP, 20, 21, 22], dict(max_new_tokens=5, stop_token_ids=[STOP]), 3),
        ([1, 1, 1], [10, 11, STOP, 20, 21, 22], dict(max_new_tokens=5, stop_token_ids=[STOP]), 2),
        ([1, 1], [10, 11, STOP, 20], dict(max_new_tokens=5, stop_token_ids=[STOP]), 3),
        ([], [EOS, 11, 12], dict(max_new_tokens=50), 1),
        ([], [10, EOS, 12], dict(max_new_tokens=50), 2),
        ([], [10, 11, EOS], dict(max_new_tokens=50), 3),
        ([], [EOS, 11, 12], dict(max_new_tokens=50, ignore_eos=True), 3),
        ([0], [1, 3, 4], dict(max_new_tokens=50, stop=["ab"]), 1),
        ([0], [3, 0, 1], dict(max_new_tokens=50, stop=["ab"]), 3),
        ([], [0, 1, 4], dict(max_new_tokens=3, stop=["b"]), 2),
        ([], [0, 5, 4], dict(max_new_tokens=50, stop_regex="f|e"), 2),
        ([], [0, VOCABULARY, 4], dict(max_new_tokens=50), 2),
        ([0] * 7, [3, 4, 5], dict(max_new_tokens=8), 1),
    ],
)
def test_kept_tokens(
    output: list[int], run: list[int], parameters: dict[str, Any], expected: int, width: int
) -> None:
    run = run[:width]
    request = FakeRequest(output, **parameters)
    assert run_end_hooks.kept_tokens(request, run) == min(expected, len(run))
    assert as_run(request, run) == plain(FakeRequest(output, **parameters), run)


tokens = st.integers(0, 9)


@settings(max_examples=400, deadline=None)
@given(
    output=st.lists(tokens, max_size=5),
    runs=st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6),
    stops=st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2),
    stop_ids=st.lists(tokens, max_size=2),
    cap=st.integers(1, 14),
    ignore_eos=st.booleans(),
)
def test_runs_end_like_single_tokens(
    output: list[int],
    runs: list[list[int]],
    stops: list[str],
    stop_ids: list[int],
    cap: int,
    ignore_eos: bool,
) -> None:
    parameters: dict[str, Any] = dict(
        max_new_tokens=cap, stop=stops or None, stop_token_ids=stop_ids, ignore_eos=ignore_eos
    )
    one, many = FakeRequest(output, **parameters), FakeRequest(output, **parameters)
    for run in runs:
        assert as_run(many, run) == plain(one, run)
        if one.finished():
            break


def test_upstream_alone_leaks_behind_a_stop() -> None:
    """Negative control (P1): without the cut, the length limit wins and two tokens behind the stop leak."""
    request = FakeRequest([], max_new_tokens=5, stop_token_ids=[STOP])
    request.output_ids.extend([10, 11, STOP, 20, 21, 22])
    request.update_finish_state(6)
    assert outcome(request) == ({"type": "length", "length": 5}, [10, 11, STOP, 20, 21])


def test_an_abort_takes_effect_at_the_next_token() -> None:
    request = FakeRequest([1], max_new_tokens=50)
    request.to_finish = FINISH_ABORT("gone")
    assert run_end_hooks.kept_tokens(request, [3, 4, 5]) == 1


def test_bad_regex_ends_at_the_first_token() -> None:
    request = FakeRequest([], max_new_tokens=50)
    request.sampling_params.stop_regex_strs = ["("]
    assert run_end_hooks.kept_tokens(request, [3, 4, 5]) == 1


def resolve(request: FakeRequest, run: list[int]) -> tuple[Any, list[list[int]]]:
    """Upstream's resolver for one request, reduced to its bookkeeping, inside the fork's hook."""
    result = SimpleNamespace(num_correct_drafts=len(run) - 1, num_correct_drafts_per_req_cpu=[len(run) - 1])

    def original(processor: Any, result: Any, batch: Any) -> list[list[int]]:
        request.kv_committed_len += len(run)
        request.spec_verify_ct += 1
        request.spec_num_correct_drafts += len(run) - 1
        request.update_spec_correct_drafts_histogram(len(run) - 1)
        return [list(run)]

    return result, run_end_hooks.resolve_tokens(original, None, result, FakeBatch([request]))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_tokens_behind_the_end_are_counted_nowhere(place: int) -> None:
    run = [7, 7, 7]
    run[place - 1] = EOS
    request = FakeRequest([4], max_new_tokens=50)
    before = request.kv_committed_len
    result, runs = resolve(request, run)
    assert runs == [run[:place]]
    assert request.kv_committed_len == before + place
    assert request.spec_num_correct_drafts == result.num_correct_drafts == place - 1
    assert sum(request.spec_correct_drafts_histogram) == request.spec_verify_ct == 1
    assert sum(i * n for i, n in enumerate(request.spec_correct_drafts_histogram)) == place - 1


def test_finished_and_retracted_requests_commit_nothing() -> None:
    for field, value in (("finished_reason", FINISH_ABORT()), ("is_retracted", True)):
        request = FakeRequest([4], max_new_tokens=50)
        setattr(request, field, value)
        before = request.kv_committed_len
        result = SimpleNamespace(num_correct_drafts=2, num_correct_drafts_per_req_cpu=[2])
        runs = run_end_hooks.resolve_tokens(lambda *_: [[EOS, 7, 7]], None, result, FakeBatch([request]))
        assert runs == [[EOS, 7, 7]]
        assert request.kv_committed_len == before


def test_rules_in_order() -> None:
    rules = EndRules(
        max_new_tokens=3, vocab_size=10, stop_tokens=frozenset({4}), text_ends=lambda ids: ids[-1] == 5
    )
    assert find_run_end([0], [1, 4], rules) == RunEnd(2, "length")
    assert find_run_end([], [4, 5], rules) == RunEnd(1, "stop token")
    assert find_run_end([], [5, 4], rules) == RunEnd(1, "stop text")
    assert find_run_end([], [-1, 4], rules) == RunEnd(1, "out of vocabulary")
    assert find_run_end([], [1, 1], rules) is None
    assert find_run_end([], [], rules) is None


def test_histogram_moves() -> None:
    histogram = [1, 0, 2]
    move_in_histogram(histogram, 2, 0)
    assert histogram == [2, 0, 1]
    move_in_histogram(histogram, 2, 1)
    assert histogram == [2, 1]
    move_in_histogram(histogram, 0, 3)
    assert histogram == [1, 1, 0, 1]
