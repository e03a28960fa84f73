"""Sampled verify: the output has the target's distribution (E6, E9, E10)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as upstream
from sglang.srt.speculative.semantics import sampling_hooks
from sglang.srt.speculative.semantics.row_sampling import RowParameters, draw_rows, per_row

from .distributions import chi_square, filtered
from .fakes import accept_chain, chain_input

DRAWS = 200_000
TARGET = (0.4, 0.3, 0.2, 0.1)
DRAFT = (0.7, 0.1, 0.1, 0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p 0.8": dict(top_p=0.8),
    "top_k 2": dict(top_k=2),
    "min_p 0.6": dict(min_p=0.6),
    "cold": dict(temperature=0.1),
    "hot": dict(temperature=2.0),
    "joint": dict(top_k=3, top_p=0.75, temperature=1.3),
    "all": dict(top_k=3, top_p=0.9, min_p=0.3, temperature=2.0),
}


class TorchSampler:
    """Upstream's sampler on its pytorch backend, without the process state that its module wants."""

    def _sample_from_probs(
        self, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
    ) -> torch.Tensor:
        if simple:
            drawn: torch.Tensor = upstream.sampling_from_probs_torch(probs, info.sampling_seed, positions)
            return drawn
        drawn = upstream.top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            info.top_ks,
            info.top_ps,
            info.min_ps,
            info.need_min_p_sampling,
            info.sampling_seed,
            positions,
        )
        return drawn


def info_for(
    batch: int,
    *,
    temperature: float = 1.0,
    top_k: int = 1 << 30,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        temperatures=torch.full((batch, 1), temperature),
        top_ks=torch.full((batch,), top_k, dtype=torch.int32),
        top_ps=torch.full((batch,), top_p),
        min_ps=torch.full((batch,), min_p),
        sampling_seed=seed,
        need_top_p_sampling=top_p != 1.0,
        need_top_k_sampling=top_k != 1 << 30,
        need_min_p_sampling=min_p > 0,
        is_any_greedy=top_k <= 1,
        is_all_greedy=False,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
    )


def target_logits(history: torch.Tensor) -> torch.Tensor:
    """A target whose distribution depends on everything before: TARGET, rolled by the sum of the history."""
    base = torch.log(torch.tensor(TARGET))
    shift = history.sum(-1) % 4
    return torch.stack([base.roll(s) for s in range(4)])[shift]


def decode(
    start: torch.Tensor, length: int, settings: dict[str, Any], *, greedy_draft: bool, draw: Any = None
) -> torch.Tensor:
    """``length`` tokens for every row of ``start``, by repeated verifies of two drafts each."""
    generator = torch.Generator().manual_seed(7)
    batch, rows = start.shape[0], 3
    out = torch.full((batch, length + rows), -1)
    done = torch.zeros(batch, dtype=torch.long)
    parameters = per_row(info_for(batch, **settings), rows)
    draw = draw or (lambda logits: draw_rows(logits, parameters, torch.zeros(batch * rows), TorchSampler()))
    bonus = start[:, 0]
    total = bonus.clone()
    while bool((done < length).any()):
        if greedy_draft:
            drafts = torch.zeros(batch, rows - 1, dtype=torch.long)
        else:
            drafts = torch.multinomial(
                torch.tensor(DRAFT).expand(batch, 4), rows - 1, True, generator=generator
            )
        candidates = torch.cat([bonus.unsqueeze(1), drafts], 1)
        sums = total.unsqueeze(1) + torch.cat([torch.zeros(batch, 1, dtype=torch.long), drafts.cumsum(1)], 1)
        logits = target_logits(sums.reshape(-1, 1))
        drawn = draw(logits).reshape(batch, rows)
        _, lengths, _ = accept_chain(candidates, drawn)
        for place in range(rows):
            accepted = (place < lengths) & (done + place < length)
            out[accepted, (done + place)[accepted]] = drawn[accepted, place]
        done += lengths
        reach = torch.arange(rows).unsqueeze(0) < lengths.unsqueeze(1)
        total = total + (drawn * reach).sum(1)
        bonus = drawn[torch.arange(batch), lengths - 1]
    return out[:, :length]


def expected_joint(settings: dict[str, Any], length: int) -> torch.Tensor:
    joint = torch.zeros([4] * length)
    for cell in torch.cartesian_prod(*[torch.arange(4)] * length).tolist():
        mass, total = 1.0, 0
        for token in cell:
            logits = target_logits(torch.tensor([[total]]))[0]
            mass *= filtered(logits.tolist(), **settings)[token]
            total += token
        joint[tuple(cell)] = mass
    return joint


@pytest.mark.parametrize("greedy_draft", [True, False], ids=["greedy draft", "sampled draft"])
@pytest.mark.parametrize("name", SETTINGS)
def test_output_has_the_targets_distribution(name: str, greedy_draft: bool) -> None:
    """E10: the joint distribution of three tokens, 200,000 texts, and each position by itself."""
    torch.manual_seed(11)
    settings = SETTINGS[name]
    tokens = decode(torch.zeros(DRAWS, 1, dtype=torch.long), 3, settings, greedy_draft=greedy_draft)
    joint = expected_joint(settings, 3)
    counts = (
        torch.zeros(64).index_add_(0, tokens @ torch.tensor([16, 4, 1]), torch.ones(DRAWS)).reshape(4, 4, 4)
    )
    statistic, bound = chi_square(counts, joint)
    assert statistic < bound
    for position in range(3):
        others = [axis for axis in range(3) if axis != position]
        statistic, bound = chi_square(counts.sum(others), joint.sum(others))
        assert statistic < bound, position


@pytest.mark.parametrize("name", ["plain", "hot", "joint"])
def test_chi_square_notices_other_rules(name: str) -> None:
    """Negative control: the argmax of every row, and top-p over renormalised top-k, are told apart."""
    torch.manual_seed(12)
    settings = SETTINGS[name]
    joint = expected_joint(settings, 3)
    greedy = decode(
        torch.zeros(DRAWS, 1, dtype=torch.long),
        3,
        settings,
        greedy_draft=True,
        draw=lambda logits: logits.argmax(-1),
    )
    counts = (
        torch.zeros(64).index_add_(0, greedy @ torch.tensor([16, 4, 1]), torch.ones(DRAWS)).reshape(4, 4, 4)
    )
    statistic, bound = chi_square(counts, joint)
    assert statistic > 100 * bound
    if name != "joint":
        return

    def renormalised(logits: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(logits / settings["temperature"], -1)
        order = probabilities.argsort(-1, descending=True)
        ranked = probabilities.gather(-1, order)
        ranked[:, settings["top_k"] :] = 0
        ranked /= ranked.sum(-1, keepdim=True)
        ranked[(ranked.cumsum(-1) - ranked) > settings["top_p"]] = 0
        return order.gather(-1, torch.multinomial(ranked, 1)).flatten()

    other = decode(torch.zeros(DRAWS, 1, dtype=torch.long), 3, settings, greedy_draft=True, draw=renormalised)
    counts = (
        torch.zeros(64).index_add_(0, other @ torch.tensor([16, 4, 1]), torch.ones(DRAWS)).reshape(4, 4, 4)
    )
    try:
        statistic, bound = chi_square(counts, joint)
    except AssertionError:
        return
    assert statistic > bound


def test_sampled_verify_of_a_batch_is_distinct_and_reaches_every_token() -> None:
    """E9: at temperature 1 the verify must not be an argmax, and mixed batches keep greedy rows greedy."""
    torch.manual_seed(3)
    batch, rows = 64, 3
    info = info_for(batch)
    info.top_ks[::2] = 1
    info.need_top_k_sampling = info.is_any_greedy = True
    logits = torch.randn(batch * rows, 50)
    drawn = draw_rows(logits, per_row(info, rows), torch.zeros(batch * rows), TorchSampler()).reshape(
        batch, rows
    )
    best = logits.argmax(-1).reshape(batch, rows)
    assert torch.equal(drawn[::2], best[::2])
    assert not torch.equal(drawn[1::2], best[1::2])


def test_rows_without_a_choice_do_not_fail_the_others() -> None:
    """A12: NaN, +inf and all -inf rows draw something inside the vocabulary; neighbours are unaffected."""
    batch, vocabulary = 4, 13
    logits = torch.full((batch, vocabulary), -40.0)
    logits[:, 5] = 0.0
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = logits.clone()
        broken[2] = bad
        drawn = draw_rows(broken, per_row(info_for(batch, top_p=0.9), 1), torch.zeros(batch), TorchSampler())
        assert drawn[[0, 1, 3]].tolist() == [5, 5, 5]
        assert 0 <= int(drawn[2]) < vocabulary


def test_unguarded_draw_fails_the_batch() -> None:
    """Negative control: the draw itself raises on one NaN row."""
    probabilities = torch.full((2, 4), 0.25)
    probabilities[1] = float("nan")
    with pytest.raises(RuntimeError):
        upstream.sampling_from_probs_torch(probabilities)


def test_parameters_are_repeated_per_row() -> None:
    info = info_for(2, temperature=0.5, seed=torch.tensor([3, 4]))
    info.top_ps = torch.tensor([0.25, 0.75])
    rows = per_row(info, 3)
    assert isinstance(rows, RowParameters)
    assert rows.top_ps.tolist() == [0.25] * 3 + [0.75] * 3
    assert rows.temperatures.shape == (6, 1)
    assert rows.sampling_seed is not None and rows.sampling_seed.tolist() == [3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_accept_along_the_draws(accepted: int) -> None:
    """The walk is upstream's; here against the chain rule written out."""
    candidates = torch.tensor([[5, 6, 7], [1, 2, 3]])
    drawn = torch.tensor([[6, 7, 8], [9, 9, 9]])
    drawn[0, accepted:] += 20
    verify_input = chain_input(candidates)
    predicted, lengths, index = sampling_hooks.accept_along(verify_input, drawn)
    expected = accept_chain(candidates, drawn)
    assert lengths.tolist() == expected[1].tolist() == [accepted + 1, 1]
    assert index.tolist() == expected[2].tolist()
    for row in index[index >= 0].tolist():
        assert predicted[row] == drawn.reshape(-1)[row]
