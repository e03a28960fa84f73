"""Log probabilities that must not tell who else was in the batch, nor whether it speculates (E12)."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers import logprob_processor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.speculative.semantics import logprob_hooks, scoring_hooks

from .fakes import FakeRequest

COLUMNS = 1009
CHOSEN = [3, 9, 1008]
MASKED, POISONED, PLAIN = "masked", "poisoned", "plain"


def sampler() -> Any:
    """Upstream's sampler as a CPU server has it, without the process group of its constructor."""
    made: Any = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    made.output_logprob_processor = logprob_processor.OutputLogprobProcessor()
    return made


def request(limit: int, tops: int, chosen: list[int] | None, *, asked: bool = True) -> Any:
    made: Any = FakeRequest([], max_new_tokens=limit)
    made.return_logprob = asked
    made.logprob = SimpleNamespace(top_logprobs_num=tops, token_ids_logprob=chosen)
    return made


def logits_of(kinds: list[str]) -> torch.Tensor:
    torch.manual_seed(7)
    logits = torch.randn(len(kinds), COLUMNS) * 6
    for row, kind in zip(logits, kinds, strict=True):
        if kind == MASKED:
            row[torch.arange(COLUMNS) % 83 != 3] = float("-inf")
        elif kind == POISONED:
            row.fill_(float("nan"))
    return logits


def sampling_info(temperatures: list[float]) -> Any:
    size = len(temperatures)
    return SimpleNamespace(
        temperatures=torch.tensor(temperatures).view(-1, 1),
        top_ks=torch.full((size,), 1 << 30),
        sampling_seed=None,
        is_all_greedy=all(t == 1.0 for t in temperatures),
        has_custom_logit_processor=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        return_sampling_masks=None,
        grammars=None,
    )


def sample(requests: list[Any], logits: torch.Tensor, info: Any, *, stock: bool = False) -> Any:
    """One prefill's sampling; ``stock`` is upstream's own, without the hooks around it."""
    batch = SimpleNamespace(reqs=requests, sampling_info=info, return_logprob=True)
    if not stock:
        scoring_hooks.mark(lambda *_: None, object, batch)
    output = SimpleNamespace(next_token_logits=logits.clone())
    forward = inspect.unwrap(Sampler.forward) if stock else Sampler.forward
    tops = [r.logprob.top_logprobs_num for r in requests]
    chosen = [r.logprob.token_ids_logprob for r in requests]
    forward(sampler(), output, info, True, tops, chosen, torch.zeros(len(requests)))
    return output


def scored(row: torch.Tensor, tops: int, chosen: list[int] | None) -> tuple[list[float], list[float]]:
    """What plain decoding says where a whole prefill wants no token: upstream's own scoring, of this row alone."""
    processor = logprob_processor.OutputLogprobProcessor()
    result = processor.compute_logprobs_only(row.unsqueeze(0), [tops], [chosen or []], lambda logits: logits)  # type: ignore[list-item]
    assert result is not None
    top = result.top_logprobs_val[0].tolist() if tops and result.top_logprobs_val else []
    ids = result.token_ids_logprobs_val[0].tolist() if chosen and result.token_ids_logprobs_val else []
    return top, ids


def told(output: Any, row: int) -> tuple[list[float], list[float]]:
    tops = getattr(output, "next_token_top_logprobs_val", None)
    chosen = getattr(output, "next_token_token_ids_logprobs_val", None)
    return (tops[row].tolist() if tops else [], chosen[row].tolist() if chosen else [])


CASES = {
    "masked": (MASKED, 1.0),
    "at a temperature": (PLAIN, 0.7),
    "masked at a temperature": (MASKED, 1.9),
}


@pytest.mark.parametrize(("tops", "chosen"), [(0, CHOSEN), (40, None), (COLUMNS, CHOSEN)])
@pytest.mark.parametrize("neighbour", [None, 1.0, 0.4])
@pytest.mark.parametrize("name", CASES)
def test_a_request_for_no_token_is_scored(
    name: str, neighbour: float | None, tops: int, chosen: list[int] | None
) -> None:
    """Alone in the sampler (as under speculation), beside a greedy request, and beside one that samples."""
    kind, temperature = CASES[name]
    requests, kinds, temperatures = [request(0, tops, chosen)], [kind], [temperature]
    if neighbour is not None:
        requests, kinds = [request(4, 2, [1]), *requests, request(0, 0, None)], [PLAIN, *kinds, PLAIN]
        temperatures = [neighbour, *temperatures, 1.0]
    at = 0 if neighbour is None else 1
    logits = logits_of(kinds)
    output = sample(requests, logits, sampling_info(temperatures))
    expected = scored(logits[at], tops, chosen)
    assert told(output, at) == expected
    stock = sample(requests, logits, sampling_info(temperatures), stock=True)
    assert told(stock, at) != expected, "control"
    if neighbour is not None:
        # Upstream's values, for the neighbour that wants a token.
        assert told(output, 0) == told(stock, 0)


def test_a_bad_row_is_told_as_such() -> None:
    """The guard of a sampler that must draw levels the row; the scores are of what the model said."""
    requests = [request(0, 3, CHOSEN), request(5, 3, CHOSEN)]
    output = sample(requests, logits_of([POISONED, PLAIN]), sampling_info([0.7, 0.7]))
    assert all(value != value for values in told(output, 0) for value in values)
    assert all(value <= 0 for values in told(output, 1) for value in values)


def test_scoring_without_a_draw_goes_the_same_way() -> None:
    """Plain decoding's own path, whose values are the reference: marked or not they are the same."""
    requests = [request(0, 3, CHOSEN), request(0, 0, CHOSEN)]
    logits, found = logits_of([MASKED, PLAIN]), []
    for marked in (True, False):
        info = sampling_info([0.7, 1.0])
        if marked:
            batch = SimpleNamespace(reqs=requests, sampling_info=info, return_logprob=True)
            scoring_hooks.mark(lambda *_: None, object, batch)
        output: Any = SimpleNamespace(next_token_logits=logits.clone())
        output_type: Any = Sampler.compute_logprobs_only
        output_type(sampler(), output, info, [3, 0], [CHOSEN, CHOSEN])
        found.append([told(output, row) for row in range(2)])
    assert found[0] == found[1]
    assert found[0][0] == scored(logits[0], 3, CHOSEN)


def test_only_who_asks_and_wants_no_token_is_scored() -> None:
    requests = [
        request(0, 2, None),
        request(1, 2, [1]),
        request(0, 0, None),
        request(0, 0, []),
        request(0, 2, [1], asked=False),
        request(0, 0, [4]),
    ]
    assert [(one.row, one.tops, one.token_ids) for one in scoring_hooks.scored_rows(requests)] == [
        (0, 2, ()),
        (5, 0, (4,)),
    ]


def test_marks_of_an_earlier_step_are_gone() -> None:
    """A batch keeps its sampling info while its rows move."""
    info = SimpleNamespace()
    batch = SimpleNamespace(reqs=[request(0, 2, None)], sampling_info=info, return_logprob=True)
    scoring_hooks.mark(lambda *_: None, object, batch)
    assert scoring_hooks.keep_scores(lambda *_: torch.zeros(1, 5), None, torch.zeros(1, 5), info).shape == (
        1,
        5,
    )
    batch.reqs = [request(9, 2, None)]
    scoring_hooks.mark(lambda *_: None, object, batch)
    output = SimpleNamespace()
    scoring_hooks.use_scores(lambda *_: None, None, output, info)
    assert vars(output) == {}
    batch.return_logprob, batch.reqs = False, [request(0, 2, None)]
    scoring_hooks.mark(lambda *_: None, object, batch)
    # By keyword, as upstream's scoring without a draw calls it.
    scoring_hooks.keep_scores(lambda *_: torch.zeros(1, 5), None, torch.zeros(1, 5), sampling_info=info)
    assert "run_scores" not in vars(info)


@pytest.mark.parametrize(("limit", "left"), [(0, 0), (1, 1)])
def test_a_request_for_no_token_has_no_entry(limit: int, left: int) -> None:
    wanted = request(limit, 0, None)
    wanted.logprob = SimpleNamespace(output_token_logprobs_val=[], output_token_logprobs_idx=[])

    def original(processor: Any, index: int, request: Any, *rest: Any) -> int:
        request.logprob.output_token_logprobs_val.append(-0.5)
        request.logprob.output_token_logprobs_idx.append(7)
        return 1

    assert scoring_hooks.prefill_entries(original, None, 0, wanted, 0, [7], 1, None) == 1
    assert len(wanted.logprob.output_token_logprobs_val) == left


@pytest.mark.parametrize("greedy_beside", [False, True])
def test_a_sampled_verify_takes_plain_decodings_logarithm(
    greedy_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, where float32 has no such probability too; banned tokens are the lowest float in both."""
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    rows, temperatures = 3, torch.tensor([[0.1], [1.0 if greedy_beside else 2.3]])
    logits = logits_of([PLAIN, MASKED, PLAIN] * 2)
    tokens = logits.argmax(-1)
    batch = SimpleNamespace(
        seq_lens=torch.tensor([4, 4]),
        sampling_info=SimpleNamespace(is_all_greedy=False, temperatures=temperatures),
        top_logprobs_nums=[COLUMNS, 5],
        token_ids_logprobs=[CHOSEN, None],
    )
    found: Any = SimpleNamespace(next_token_logits=logits.clone())
    logprob_processor.compute_spec_v2_logprobs(
        batch, found, tokens, torch.arange(2 * rows).view(2, rows), rows - 1
    )
    plain = torch.log(torch.softmax(logits / temperatures.repeat_interleave(rows, 0), -1))
    expected = logprob_processor.OutputLogprobProcessor().compute_logprobs(
        plain,
        [COLUMNS] * rows + [5] * rows,
        [CHOSEN] * rows + [None] * rows,
        tokens,  # type: ignore[list-item]
    )
    assert expected.token_logprobs is not None and expected.top_logprobs_val is not None
    assert torch.equal(found.next_token_logprobs.flatten(), expected.token_logprobs)
    for ours, theirs in zip(found.next_token_top_logprobs_val, expected.top_logprobs_val, strict=True):
        assert torch.equal(ours, theirs)
    lowest = torch.finfo(torch.float32).min
    assert found.next_token_top_logprobs_val[0][-1] == lowest, (
        "control: the log softmax of this token is a number"
    )
    assert torch.log_softmax(logits[0] / 0.1, -1).min() > lowest


def test_the_deterministic_mode_keeps_the_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    deterministic = SimpleNamespace(enable_deterministic_inference=True)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    logits = logits_of([PLAIN]) * 20
    found = logprob_hooks.sampled_log_softmax(torch.log_softmax, logits, dim=-1)
    assert torch.equal(found, torch.log_softmax(logits, -1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_greedy_row_has_no_temperature(dtype: torch.dtype) -> None:
    requests = [
        FakeRequest([], temperature=2.0, top_k=1),
        FakeRequest([], temperature=2.0, top_k=5),
        FakeRequest([], temperature=0),
        FakeRequest([], temperature=0.3),
    ]

    def original(kind: type, batch: Any, vocab_size: int) -> Any:
        each = [r.sampling_params for r in batch.reqs]
        return SimpleNamespace(
            temperatures=torch.tensor([p.temperature for p in each], dtype=torch.float).view(-1, 1),
            top_ks=torch.tensor([p.top_k for p in each], dtype=dtype),
        )

    batch = SimpleNamespace(reqs=requests)
    found = logprob_hooks.greedy_unscaled(original, object, batch, COLUMNS)
    assert found.temperatures.flatten().tolist() == pytest.approx([1.0, 2.0, 1.0, 0.3])
    assert original(object, batch, COLUMNS).temperatures[0] == 2.0, "control"
