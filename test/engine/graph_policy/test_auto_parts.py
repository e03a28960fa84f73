"""The parts of the switch: admission, the rows that wait for the draft, what a plain result counts as."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.auto import admission, catch_up, hooks, plain
from sglang.srt.speculative.auto.admission import BatchFacts, ServerFacts, admit_batch, admit_server
from sglang.srt.speculative.auto.rows import FEWEST, MOST, MOST_BYTES, RowRing, span_for
from sglang.srt.speculative.auto.runtime import OWED, make_controller
from sglang.srt.speculative.auto.runtime import Runtime as RealRuntime
from sglang.srt.speculative.stats.accept import histogram_faults

SERVER = ServerFacts(
    wanted=True,
    algorithm="EAGLE3",
    topk=1,
    device="cuda",
    graphs=True,
    target_backend="TritonAttnBackend",
    draft_backend="TritonAttnBackend",
    draft_layers=1,
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"wanted": False}, "--speculative-auto off"),
        ({"algorithm": "NGRAM"}, "NGRAM"),
        ({"topk": 4}, "top-k 4"),
        ({"simulated": True}, "simulated"),
        ({"simulated": True, "on_simulated": True}, None),
        ({"device": "cpu"}, "CPU"),
        ({"device": "cpu", "on_cpu": True, "graphs": False}, None),
        ({"graphs": False}, "CUDA graphs are disabled"),
        ({"target_backend": "FlashInferMLAAttnBackend"}, "the target's attention backend"),
        ({"draft_backend": "FlashAttentionBackend"}, "the draft's attention backend"),
        ({"draft_layers": 2}, "2 layers"),
        *(({name: True}, words) for name, words in admission.FEATURES),
    ],
)
def test_server_admission(changes: dict[str, Any], words: str | None) -> None:
    reason = admit_server(replace(SERVER, **changes))
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_every_feature_of_the_facts_is_asked() -> None:
    asked = {name for name, _ in admission.FEATURES}
    known = {field.name for field in fields(ServerFacts) if field.default is False}
    assert known - asked == {"simulated", "on_cpu", "on_simulated"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"requests": 0}, "idle"),
        ({"grammar": True}, "grammar"),
        ({"logprobs": True}, "log-probabilities"),
        ({"hidden_states": True}, "hidden states"),
        ({"penalties": True}, "penalties"),
        ({"processors": True}, "logit processor"),
        ({"whole": False}, "without the target's hidden states"),
    ],
)
def test_batch_admission(changes: dict[str, Any], words: str | None) -> None:
    reason = admit_batch(replace(BatchFacts(requests=3), **changes))
    assert (reason is None) if words is None else (reason is not None and words in reason)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 1 << 16))
def test_the_ring_gives_back_what_was_kept_last(span: int, steps: int, seed: int) -> None:
    """Requests at odd positions; the last ``span`` rows of each are there, older ones are overwritten."""
    draw = torch.Generator().manual_seed(seed)
    ring = RowRing(5, span, 13, torch.float32, "cpu")
    slots = torch.tensor([3, 1, 4], dtype=torch.int64)
    lengths = torch.randint(0, 50, (3,), generator=draw)
    kept: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
    for _ in range(steps):
        hidden = torch.randn(3, 13, generator=draw)
        tokens = torch.randint(0, 99, (3,), generator=draw)
        ring.store(slots, lengths, hidden, tokens)
        for row, slot in enumerate(slots.tolist()):
            kept[slot, int(lengths[row])] = (hidden[row], int(tokens[row]))
        lengths = lengths + 1
    for row, slot in enumerate(slots.tolist()):
        for back in range(1, min(span, steps) + 1):
            position = lengths[row : row + 1] - back
            hidden, tokens = ring.read(torch.tensor([slot]), position)
            expected = kept[slot, int(position)]
            assert torch.equal(hidden[0], expected[0]) and int(tokens[0]) == expected[1]
    assert not ring.hidden[0].any() and not ring.hidden[2].any(), "other slots are left alone"


@given(st.integers(2, 600), st.integers(64, 22000), st.sampled_from([2, 4]))
def test_the_ring_stays_small(slots: int, width: int, size: int) -> None:
    span = span_for(slots, width, size)
    assert FEWEST <= span <= MOST
    assert span == FEWEST or span * slots * width * size <= MOST_BYTES


@given(st.lists(st.integers(0, 5), max_size=6))
def test_owed_rows_are_listed_oldest_first(owed: list[int]) -> None:
    index, behind = catch_up.owed_rows(owed)
    assert len(index) == sum(owed)
    for request, rows in enumerate(owed):
        assert [back for i, back in zip(index, behind, strict=True) if i == request] == list(
            range(rows, 0, -1)
        )


@pytest.mark.parametrize("owed", ([0, 0], [3], [128, 128, 1], [900, 200], [1024, 1024, 5]))
def test_rows_are_written_in_passes_of_bounded_size(owed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every owed row once, oldest first, at the slot of its position; no pass larger than the bound."""
    passes: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(catch_up, "_forward", lambda runner, *rows: passes.append(rows))
    span = 2048
    ring = RowRing(len(owed) + 1, span, 2, torch.float32, "cpu")
    table = torch.arange((len(owed) + 1) * 3000).reshape(len(owed) + 1, 3000)
    lengths = torch.tensor([1100 + 7 * index for index in range(len(owed))])
    slots = torch.arange(len(owed)) + 1
    for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
        for position in range(length):
            ring.tokens[slot, position % span] = 10_000 * slot + position
    batch = SimpleNamespace(seq_lens=lengths, req_pool_indices=slots)
    assert catch_up.write_rows(SimpleNamespace(draft_runner=None), ring, table, batch, owed) == sum(owed)
    assert all(0 < rows[0].shape[0] <= catch_up.PASS_ROWS for rows in passes)
    written = [
        (int(token), int(place))
        for tokens, _, _, _, places in passes
        for token, place in zip(tokens, places, strict=True)
    ]
    expected = [
        (10_000 * slot + position, 3000 * slot + position)
        for slot, length, rows in zip(slots.tolist(), lengths.tolist(), owed, strict=True)
        for position in range(length - rows, length)
    ]
    assert written == expected


def test_keys_only_stores_and_attends_to_nothing() -> None:
    """Poisoned values elsewhere in the pool cannot come back: the pool is never read."""
    stored: list[Any] = []
    pool = SimpleNamespace(
        set_kv_buffer=lambda layer, place, k, v, *scales: stored.append((place.loc, k, v, scales))
    )
    backend = catch_up.KeysOnly(SimpleNamespace(token_to_kv_pool=pool, other=7))
    layer = SimpleNamespace(k_scale=None, v_scale=None, tp_q_head_num=4, v_head_dim=3)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([5, 9]))
    q, k, v = torch.full((2, 4, 8), float("nan")), torch.ones(2, 1, 8), torch.ones(2, 1, 3)
    out = backend.forward(q, k, v, layer, batch)
    assert out.shape == (2, 12) and not out.any()
    assert stored[0][0] is batch.out_cache_loc and stored[0][3] == () and backend.other == 7
    layer.k_scale, layer.v_scale = 0.5, 2.0
    backend.forward(q, k, v, layer, batch)
    assert stored[1][3] == (0.5, 2.0)
    backend.forward(q, None, None, layer, batch)
    backend.forward(q, k, v, layer, batch, save_kv_cache=False)
    assert len(stored) == 2


class Request:
    """A request as far as results settle it."""

    def __init__(self, **values: Any) -> None:
        self.origin_input_ids = list(range(values.pop("prompt", 10)))
        self.spec_verify_ct, self.spec_correct_drafts_histogram = 0, []
        self.done = values.pop("done", False)
        self.is_retracted = False
        self.kv_committed_len = 0
        for name, value in values.items():
            setattr(self, name, value)

    def finished(self) -> bool:
        """Whether it ended before."""
        return self.done


def settle(processor: Any, result: Any, batch: Any) -> list[list[int]]:
    """Upstream's resolver as far as it counts."""
    for request in batch.reqs:
        if not request.finished():
            request.spec_verify_ct += 1
            drafts = result.drafts
            histogram = request.spec_correct_drafts_histogram
            histogram.extend([0] * (drafts + 1 - len(histogram)))
            histogram[drafts] += 1
    return [[7]] * len(batch.reqs)


def test_a_plain_step_is_no_verify() -> None:
    told: list[Any] = []
    worker = SimpleNamespace(fork_auto=SimpleNamespace(settled=told.append))
    processor = SimpleNamespace(model_worker=worker)
    batch = SimpleNamespace(reqs=[Request(), Request(done=True)])
    cycle = SimpleNamespace(drafts=2)
    step = SimpleNamespace(next_token_ids=torch.tensor([7, 7]), **{plain.MARK: True})
    for result in (step, cycle, step, step):
        assert hooks.resolve_tokens(settle, processor, result, batch) == [[7], [7]]
        counted = hooks.spec_metrics(lambda *_: "counted", None, 2, 0)
        assert (counted is None) == (result is step)
    live, ended = batch.reqs
    assert live.spec_verify_ct == 1 and live.spec_correct_drafts_histogram == [0, 0, 1]
    assert ended.spec_verify_ct == 0 and told == [cycle]
    assert plain.plain_steps_of(live) == 3 and plain.plain_steps_of(ended) == 0
    assert live.kv_committed_len == 3 and ended.kv_committed_len == 0
    assert histogram_faults([0, 0, 1], 1, 2, completion_tokens=7, plain_steps=3) == []
    assert histogram_faults([0, 0, 1], 1, 2, completion_tokens=7), "negative control"


def test_a_plain_step_is_settled_as_upstream_settles_a_verify_of_width_one() -> None:
    """Upstream's own resolver as the oracle; a request that ended or was retracted commits nothing."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    oracle = inspect.unwrap(SchedulerBatchResultProcessor._resolve_spec_v2_tokens)
    processor = SimpleNamespace(
        model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *args, **kw: None),
        advance_grammar_fsm=lambda result, batch: None,
    )
    found = []
    for resolve in (
        lambda result, batch: oracle(processor, result, batch),
        lambda r, b: plain.settle(r, b.reqs),
    ):
        requests = [Request(kv_committed_len=20 + index, done=index == 1) for index in range(3)]
        requests[2].is_retracted = True
        for request in requests:
            request.grammar, request.spec_num_correct_drafts = None, 5
            request.update_spec_correct_drafts_histogram = lambda drafts: None
        result = GenerationBatchResult(
            next_token_ids=torch.tensor([4, 5, 6]),
            accept_lens=torch.ones(3, dtype=torch.int32),
            speculative_num_draft_tokens=1,
        )
        tokens = resolve(result, SimpleNamespace(reqs=requests))
        told = {name: value for name, value in vars(result).items() if not torch.is_tensor(value)}
        kept = [(request.kv_committed_len, request.spec_num_correct_drafts) for request in requests]
        found.append((tokens, told, kept))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("length", "owed", "left"),
    [(40, 0, 40), (40, 5, 35), (12, 5, 10), (10, 1, 10), (6, 3, 6), (33, 32, 10)],
)
def test_rows_that_the_draft_owes_are_not_left_to_others(length: int, owed: int, left: int) -> None:
    """Never below the prompt: its rows were written by the prefill, and the prefix cache holds them already."""
    request = Request(prompt=10, cache_protected_len=8, **{OWED: owed})
    assert hooks.committed(lambda _: length, request) == left


@pytest.mark.parametrize(("length", "owed", "left"), [(41, 1, 41), (43, 4, 41), (50, 4, 46), (41, 0, 41)])
def test_what_the_prefix_cache_has_is_not_released(length: int, owed: int, left: int) -> None:
    """After a retraction the output was prefilled too; a step in flight owes a row and is not yet committed.

    41 tokens are 40 pairs, which is what the cache keys by: a length of 40 would release a slot that it holds.
    """
    request = Request(prompt=10, cache_protected_len=40, **{OWED: owed})
    assert hooks.committed(lambda _: length, request) == left


def test_accept_lengths_of_a_plain_step_are_on_the_host_already() -> None:
    """One copy less in every step: upstream copies what is on the device."""
    assert plain.Stubs(1, 6, torch.bfloat16, "meta").get(3)[3].device.type == "cpu"


def test_stubs_grow_and_are_shared() -> None:
    stubs = plain.Stubs(1, 6, torch.bfloat16, "cpu")
    scores, ids, hidden, ones = stubs.get(3)
    assert scores.shape == (3, 1) and ids.shape == (3, 1) and hidden is not None and hidden.shape == (3, 6)
    assert ones.tolist() == [1, 1, 1] and ones.dtype == torch.int32
    assert stubs.get(2)[0].data_ptr() == scores.data_ptr() and stubs.get(3)[0] is scores
    assert stubs.get(9)[3].tolist() == [1] * 9
    assert plain.Stubs(1, None, torch.float32, "cpu").get(2)[2] is None


@pytest.mark.parametrize(("script", "kind"), [("", "Controller"), ("3", "Scripted"), ("0", "Controller")])
def test_tests_may_script_the_switch(monkeypatch: pytest.MonkeyPatch, script: str, kind: str) -> None:
    monkeypatch.setenv("SGLANG_SPEC_AUTO_SCRIPT", script)
    assert type(make_controller()).__name__ == kind


def test_without_the_switch_a_step_is_upstreams() -> None:
    worker = SimpleNamespace(fork_auto=None)
    assert hooks.step(lambda *args, **kw: (args, kw), worker, "batch", on_publish=1, grammar_barrier=2) == (
        (worker, "batch"),
        {"on_publish": 1, "grammar_barrier": 2},
    )


def test_a_plain_step_that_fails_becomes_a_cycle_and_the_switch_stays_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch is put back as it was, the draft owes nothing for a step that did not run."""

    class Runtime:
        """A switch that would decode plainly."""

        gave_up, plain_begun = "", 1

        def choose(self, batch: Any) -> str:
            return "speculate" if self.gave_up else "plain"

        def before_plain(self, batch: Any, on_publish: Any) -> None:
            for request in batch.reqs:
                setattr(request, OWED, getattr(request, OWED, 0) + 1)

        def before_cycle(self, batch: Any, on_publish: Any) -> None:
            assert [getattr(request, OWED) for request in batch.reqs] == [0, 2]

        give_up = RealRuntime.give_up

        def exchange(self) -> None:
            """One rank."""

    def broken(worker: Any, runtime: Any, batch: Any, on_publish: Any) -> Any:
        batch.seq_lens, batch.spec_info, batch.forward_mode = "longer", None, "decode"
        raise AttributeError("no such thing")

    monkeypatch.setattr(hooks, "timed_plain", broken)
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    batch = SimpleNamespace(
        **{**dict.fromkeys(plain.CHANGED, 1), "forward_mode": mode},
        is_extend_in_batch=False,
        reqs=[Request(), Request(**{OWED: 2})],
    )
    before = dict(vars(batch))
    worker = SimpleNamespace(fork_auto=Runtime())
    for _ in range(2):
        assert hooks.step(lambda *args, **kw: "cycle", worker, batch) == "cycle"
        assert vars(batch) == before
    assert "AttributeError" in worker.fork_auto.gave_up
