"""Penalties in verify are those of plain decoding, row by row and after the accept (E6, E7, E8, P2)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.semantics import penalty_hooks, verify_tree

from .fakes import EOS, VOCABULARY, FakeBatch, FakeRequest, accept_chain, chain_input

KINDS: dict[str, dict[str, Any]] = {
    "frequency": dict(frequency_penalty=1.3),
    "presence": dict(presence_penalty=-0.7),
    "repetition": dict(repetition_penalty=1.7),
    "repetition below one": dict(repetition_penalty=0.6),
    "minimum": dict(min_new_tokens=6),
    "all": dict(frequency_penalty=0.4, presence_penalty=0.9, repetition_penalty=1.2, min_new_tokens=7),
    "none": {},
}
# Untyped upstream classes, through Any so that the type checker lets them be called.
LIBRARY: Any = penaltylib
PENALIZERS = {
    getattr(LIBRARY, f"Batched{kind}Penalizer")
    for kind in ("Frequency", "MinNewTokens", "Presence", "Repetition")
}


def orchestrator(batch: FakeBatch) -> Any:
    return LIBRARY.BatchedPenalizerOrchestrator(vocab_size=VOCABULARY, batch=batch, penalizers=PENALIZERS)


def plain_logits(raw: torch.Tensor, parameters: dict[str, Any], history: list[int]) -> torch.Tensor:
    """Upstream's penalisers fed one token at a time, then applied to one row."""
    batch = FakeBatch([FakeRequest(max_new_tokens=99, **parameters)], algorithm="none")
    penalizers: Any = orchestrator(batch)
    for token in history:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    logits = raw.clone().unsqueeze(0)
    if penalizers.is_required:
        penalizers.apply(logits)
    return logits[0]


def info_of(penalizers: Any) -> SimpleNamespace:
    return SimpleNamespace(
        run_penalizers=penalizers, acc_additive_penalties="relaxed", acc_scaling_penalties="relaxed"
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_plain_decoding(kind: str, rows: int) -> None:
    """Several verifies with random drafts and accepts; every row is compared, rejected ones too."""
    generator = random.Random(f"{kind} {rows}")
    torch.manual_seed(generator.randrange(2**31))
    kinds = [KINDS[kind], {}, KINDS["all"]]
    batch = FakeBatch([FakeRequest(max_new_tokens=99, **parameters) for parameters in kinds])
    penalizers = orchestrator(batch)
    info = batch.sampling_info = info_of(penalizers)

    # Few distinct tokens, so that candidates repeat tokens of the history and each other.
    def pick() -> int:
        return generator.choice([EOS, 7, 11])

    committed = [[pick()] for _ in kinds]
    for _ in range(6):
        candidates = torch.tensor([[c[-1], *(pick() for _ in range(rows - 1))] for c in committed])
        raw = torch.randn(len(kinds) * rows, VOCABULARY) * 3
        output = SimpleNamespace(next_token_logits=raw.clone())
        drawn = torch.tensor([[pick() for _ in range(rows)] for _ in kinds])

        def sample(*_: Any, candidates: torch.Tensor = candidates, drawn: torch.Tensor = drawn) -> Any:
            assert info.acc_additive_penalties is None and info.acc_scaling_penalties is None
            return accept_chain(candidates, drawn)

        _, lengths, _ = penalty_hooks.verify(sample, chain_input(candidates), batch, output)
        for i, parameters in enumerate(kinds):
            for row in range(rows):
                history = committed[i] + candidates[i, 1 : row + 1].tolist()
                expected = plain_logits(raw[i * rows + row], parameters, history)
                assert torch.equal(output.next_token_logits[i * rows + row], expected), (i, row)
        for i, length in enumerate(lengths.tolist()):
            committed[i] += drawn[i, :length].tolist()


def test_trees_take_the_path_to_the_row() -> None:
    parents = [-1, 0, 0, 1, 1, 2]
    child = torch.tensor([[1, 3, 5, -1, -1, -1]])
    sibling = torch.tensor([[-1, 2, -1, 4, -1, -1]])
    parameters = KINDS["all"]
    batch = FakeBatch([FakeRequest(max_new_tokens=99, **parameters)])
    penalizers = orchestrator(batch)
    tokens = torch.tensor([[7, 7, 11, EOS, 7, 7]])
    raw = torch.randn(6, VOCABULARY)
    logits = raw.clone()
    penalty_hooks.penalise_rows(logits, penalizers, tokens, verify_tree.ancestor_mask(child, sibling))
    for row in range(6):
        path: list[int] = []
        at = row
        while at >= 0:
            path.insert(0, int(tokens[0, at]))
            at = parents[at]
        assert torch.equal(logits[row], plain_logits(raw[row], parameters, path)), row
    # Accepting root, node 2 and node 5 leaves the state that plain decoding would have.
    penalty_hooks.grow_state(penalizers, tokens, torch.tensor([[0, 2, 5]]))
    logits = raw[:1].clone()
    penalizers.apply(logits)
    assert torch.equal(logits[0], plain_logits(raw[0], parameters, [7, 11, 7]))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_min_new_tokens_is_exact(width: int) -> None:
    """E8: a model that wants to end at once ends after exactly six tokens, whatever the run length."""
    batch = FakeBatch([FakeRequest(max_new_tokens=50, min_new_tokens=6)])
    penalizers = orchestrator(batch)
    batch.sampling_info = info_of(penalizers)
    wants_end = torch.zeros(VOCABULARY)
    wants_end[EOS], wants_end[9] = 5.0, 1.0
    committed = [9]
    while committed[-1] != EOS:
        candidates = torch.tensor([[committed[-1], *[9] * (width - 1)]])
        output = SimpleNamespace(next_token_logits=wants_end.repeat(width, 1))

        def sample(*_: Any, candidates: torch.Tensor = candidates, output: Any = output) -> Any:
            return accept_chain(candidates, output.next_token_logits.argmax(-1).reshape(1, -1))

        predicted, lengths, _ = penalty_hooks.verify(sample, chain_input(candidates), batch, output)
        for token in predicted[: int(lengths)].tolist():
            committed.append(token)
            if token == EOS:
                break
    assert len(committed) == 7 and committed[:6] == [9] * 6


def test_upstream_alone_blocks_the_end_three_times_as_long() -> None:
    """Negative control (P2): one call a step counts one token, so a step of three counts a third."""
    batch = FakeBatch([FakeRequest(max_new_tokens=50, min_new_tokens=6, frequency_penalty=1.0)])
    penalizers = orchestrator(batch)
    produced = 0
    while torch.isinf(applied(penalizers)[EOS]):
        produced += 3
        penalizers.cumulate_output_tokens(torch.tensor([produced]))
    assert produced == 18
    penalised = (applied(penalizers) != 0).nonzero().flatten().tolist()
    assert penalised == [3, 6, 9, 12, 15, 18]


def applied(penalizers: Any) -> torch.Tensor:
    logits = torch.zeros(1, VOCABULARY)
    penalizers.apply(logits)
    return logits[0]


@pytest.mark.parametrize("algorithm", ["eagle", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_retracted_requests_keep_their_history(kind: str, algorithm: str) -> None:
    """F3: a request that comes back from retraction is penalised for what it had said before."""
    history = [7, 11, 7, 9, 7]
    fresh = FakeRequest(max_new_tokens=99, **KINDS["all"])
    batch = FakeBatch([fresh, FakeRequest(history, max_new_tokens=99, **KINDS[kind])], algorithm=algorithm)
    raw = torch.randn(2, VOCABULARY)
    logits = raw.clone()
    orchestrator(batch).apply(logits)
    assert torch.equal(logits[1], plain_logits(raw[1], KINDS[kind], history))
    assert torch.equal(logits[0], plain_logits(raw[0], KINDS["all"], []))


def test_plain_overlap_is_told_of_the_newest_token_later() -> None:
    history = [7, 11, 7]
    batch = FakeBatch(
        [FakeRequest(history, max_new_tokens=99, **KINDS["all"])], algorithm="none", overlap=True
    )
    raw = torch.randn(1, VOCABULARY)
    logits = raw.clone()
    orchestrator(batch).apply(logits)
    assert torch.equal(logits[0], plain_logits(raw[0], KINDS["all"], history[:-1]))


def test_additive_penalties_come_first() -> None:
    """The set of penaliser classes has no order; the result must not depend on it."""
    parameters: dict[str, Any] = dict(frequency_penalty=1.5, repetition_penalty=2.0)
    raw = torch.full((VOCABULARY,), 1.0)
    for backwards in (False, True):
        batch = FakeBatch([FakeRequest(max_new_tokens=99, **parameters)], algorithm="none")
        penalizers = orchestrator(batch)
        classes = sorted(penalizers.penalizers, key=lambda c: str(c.__name__), reverse=backwards)
        penalizers.penalizers = {c: penalizers.penalizers[c] for c in classes}
        penalizers.cumulate_output_tokens(torch.tensor([7]))
        logits = raw.clone().unsqueeze(0)
        penalizers.apply(logits)
        assert logits[0, 7].item() == (1.0 - 1.5) * 2.0


def test_only_verifying_algorithms_skip_the_step_update() -> None:
    for algorithm, expected in (("eagle", []), ("none", ["told"]), ("dflash", ["told"])):
        told: list[str] = []

        def tell(_: Any, told: list[str] = told) -> None:
            told.append("told")

        penalty_hooks.cumulate(tell, FakeBatch([], algorithm=algorithm))
        assert told == expected


def test_unpenalised_batches_go_straight_through() -> None:
    batch = FakeBatch([FakeRequest(max_new_tokens=9)])
    batch.sampling_info = info_of(orchestrator(batch))
    assert penalty_hooks.verify(lambda *_: "untouched", None, batch, None) == "untouched"
    batch.sampling_info = SimpleNamespace()
    assert penalty_hooks.verify(lambda *_: "untouched", None, batch, None) == "untouched"


def test_forward_copy_reaches_the_penalisers() -> None:
    """The copy that a forward pass gets has no orchestrator of its own, but the fork's way to it."""
    batch = FakeBatch([FakeRequest(max_new_tokens=9, **KINDS["all"])])
    penalizers = orchestrator(batch)
    info = SamplingBatchInfo(
        temperatures=torch.ones(1, 1),
        top_ps=torch.ones(1),
        top_ks=torch.ones(1),
        min_ps=torch.zeros(1),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
        penalizer_orchestrator=penalizers,
    )
    copy = info.copy_for_forward()
    assert copy.penalizer_orchestrator is None
    assert copy.run_penalizers is penalizers
