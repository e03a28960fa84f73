"""Rejection sampling: the output has the target's distribution, and agreement makes runs longer."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.speculative.sampling import hooks
from sglang.srt.speculative.sampling.filters import filtered_probabilities
from sglang.srt.speculative.sampling.rejection import draw, residual, verify_chain
from torch import Tensor

P, Q = (0.4, 0.3, 0.2, 0.1), (0.7, 0.1, 0.1, 0.1)
DRAFTS, DRAWS = 3, 200_000


def target_of(history: int) -> list[float]:
    """A target that depends on everything before it: P, rotated by the sum of the text so far."""
    return [P[(token - history) % 4] for token in range(4)]


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """The statistic, and the value that chance exceeds once in a million (Wilson-Hilferty)."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    freedom = int(used.sum()) - 1
    spread = 2 / (9 * freedom)
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    return statistic, freedom * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


def texts(q: tuple[float, ...], *, wrong: bool = False) -> tuple[Tensor, Tensor]:
    """`DRAWS` verified chains; returns the first two tokens of each text and the accepted drafts.

    Where a chain ends after one token, the second is drawn by a further verify, as a server does.
    """
    generator = torch.Generator().manual_seed(3)
    table = torch.tensor([target_of(history) for history in range(4)])

    def verify(history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        proposal = torch.tensor(q).expand(DRAWS, DRAFTS, 4)
        drafts = torch.multinomial(torch.tensor(q), DRAWS * DRAFTS, True, generator=generator).view(
            DRAWS, DRAFTS
        )
        sums = history.unsqueeze(1) + torch.cat(
            [torch.zeros(DRAWS, 1, dtype=torch.int64), drafts.cumsum(1)], 1
        )
        coins = torch.rand(DRAWS, DRAFTS + 1, generator=generator)
        accepted, token = verify_chain(table[sums % 4], proposal, drafts, coins[:, 1:], coins[:, 0])
        if wrong:
            # What a verify without the residual does: draw the token after a rejection from the target itself.
            token = draw(table[(sums % 4)[torch.arange(DRAWS), accepted]], coins[:, 0])
        return accepted, drafts, token

    accepted, drafts, token = verify(torch.zeros(DRAWS, dtype=torch.int64))
    first = torch.where(accepted >= 1, drafts[:, 0], token)
    after, drafts_after, token_after = verify(first)
    next_verify = torch.where(after >= 1, drafts_after[:, 0], token_after)
    second = torch.where(accepted >= 2, drafts[:, 1], torch.where(accepted == 1, token, next_verify))
    return torch.stack([first, second], 1), accepted


def joint() -> Tensor:
    cells = torch.zeros(4, 4)
    for one, two in itertools.product(range(4), range(4)):
        cells[one, two] = target_of(0)[one] * target_of(one)[two]
    return cells


@pytest.mark.parametrize("q", [Q, P, (0.0, 0.0, 0.0, 1.0), (0.25, 0.25, 0.25, 0.25)], ids=str)
def test_output_has_the_targets_distribution(q: tuple[float, ...]) -> None:
    tokens, _ = texts(q)
    counts = torch.bincount(tokens @ torch.tensor([4, 1]), minlength=16).view(4, 4)
    for observed, wanted in (
        (counts, joint()),
        (counts.sum(1), joint().sum(1)),
        (counts.sum(0), joint().sum(0)),
    ):
        statistic, bound = chi_square(observed.flatten(), wanted.flatten())
        assert statistic < bound


def test_without_the_residual_the_test_fails() -> None:
    """Negative control: the test has to see the commonest mistake."""
    tokens, _ = texts(Q, wrong=True)
    statistic, bound = chi_square(torch.bincount(tokens[:, 0], minlength=4), torch.tensor(target_of(0)))
    assert statistic > 10 * bound


def test_acceptance_is_the_overlap() -> None:
    """A draft is accepted with probability sum(min(p, q)); equal distributions accept everything."""
    _, accepted = texts(Q)
    overlap = sum(min(p, q) for p, q in zip(target_of(0), Q, strict=True))
    assert abs(float((accepted >= 1).double().mean()) - overlap) < 0.005
    chains = torch.tensor(P).expand(50, DRAFTS + 1, 4)
    drafts = torch.randint(0, 4, (50, DRAFTS))
    coins = torch.rand(50, DRAFTS)
    accepted, _ = verify_chain(chains, chains[:, :DRAFTS], drafts, coins, torch.rand(50))
    assert accepted.eq(DRAFTS).all()


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda row: sum(row) > 1e-3),
    st.floats(0, 0.999999),
)
def test_a_token_without_mass_is_never_drawn(row: list[float], coin: float) -> None:
    for edge in (0.0, coin, 1 - 2**-24):
        token = int(draw(torch.tensor([row]), torch.tensor([edge])))
        assert row[token] > 0
    below = sum(row[: int(draw(torch.tensor([row]), torch.tensor([coin])))])
    assert below <= coin * sum(row) + 1e-5


def test_impossible_drafts_and_empty_residuals() -> None:
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    proposal = torch.tensor([[[1.0, 0.0]]])
    accepted, token = verify_chain(target, proposal, torch.tensor([[0]]), torch.zeros(1, 1), torch.zeros(1))
    assert (accepted.tolist(), token.tolist()) == ([0], [1])
    same = torch.tensor([[0.5, 0.5]])
    assert residual(same, same).tolist() == same.tolist()
    assert residual(same, torch.full((1, 2), float("nan"))).tolist() == same.tolist()


def plain(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The definition, token by token."""
    weights = [math.exp(value / temperature) for value in logits]
    probabilities = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(logits)), key=lambda i: -probabilities[i])
    if top_k == 1:
        return [float(i == order[0]) for i in range(len(logits))]
    kept, mass = set(), 0.0
    for rank, i in enumerate(order):
        if rank < top_k and mass <= top_p and probabilities[i] >= min_p * probabilities[order[0]]:
            kept.add(i)
        mass += probabilities[i]
    total = sum(probabilities[i] for i in kept)
    return [probabilities[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(deadline=None)
@given(
    st.lists(st.integers(-400, 400), min_size=2, max_size=7, unique=True),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(1, 8),
    st.sampled_from([0.11, 0.537, 0.913, 1.0]),
    st.sampled_from([0.0, 0.217, 0.731]),
)
def test_filters_keep_what_plain_decoding_keeps(
    hundredths: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [value / 100 for value in hundredths]
    got = filtered_probabilities(
        torch.tensor([logits]),
        torch.tensor([[temperature]]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    want = torch.tensor([plain(logits, temperature, top_k, top_p, min_p)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def verify_input(**changes: object) -> SimpleNamespace:
    given = {
        "draft_token_num": 3,
        "tree_topk": 1,
        "draft_token": torch.tensor([9, 1, 2, 9, 0, 3]),
        "retrieve_index": torch.arange(6).view(2, 3),
        "draft_probs": torch.full((2, 2, 4), 0.25),
    }
    return SimpleNamespace(**{**given, **changes})


def test_the_verify_reports_nodes_and_tokens_as_upstream_reads_them() -> None:
    # Request 0 accepts both drafts and draws 3; request 1 rejects the first and draws 2. Greedy rows: certain.
    certain = [1, 2, 3, 2, 0, 0]
    logits = torch.full((6, 4), -5.0)
    logits[torch.arange(6), certain] = 5.0
    rows = SimpleNamespace(
        temperatures=torch.ones(6, 1),
        top_ks=torch.ones(6, dtype=torch.int32),
        top_ps=torch.ones(6),
        min_ps=torch.zeros(6),
    )
    predicted, lengths, index = hooks.rejection_verify(verify_input(), logits, rows)
    assert lengths.tolist() == [3, 1]
    assert index.tolist() == [[0, 1, 2], [3, -1, -1]]
    assert predicted[index[0]].tolist() == [1, 2, 3]
    assert predicted[3] == 2
    assert {predicted.dtype, lengths.dtype, index.dtype} == {torch.int32}


@pytest.mark.parametrize(
    "changes", [{"tree_topk": 2}, {"draft_probs": None}, {"draft_probs": torch.ones(2, 2, 3)}, {}], ids=str
)
def test_what_a_proposal_must_be(changes: dict[str, object]) -> None:
    assert hooks.usable_proposal(verify_input(**changes), 4, seeded=False) is (not changes)
    assert not hooks.usable_proposal(verify_input(**changes), 4, seeded=True)
