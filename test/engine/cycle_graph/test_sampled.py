"""Draws inside the graph: uniform coins, the plain sampler's distribution, greedy rows, bad rows, and whole chains."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative.cycle_graph.accept import accept_chain
from sglang.srt.speculative.cycle_graph.buffers import Sampling
from sglang.srt.speculative.cycle_graph.sampled import choose, coins
from sglang.srt.speculative.sampling.filters import filtered_probabilities

DRAWS = 20000
# Chi-square quantile of 1 - 1e-6 at 15 degrees of freedom is 56; a wrong distribution gives thousands.
LIMIT = 60.0


def parameters(
    batch: int, temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    made = Sampling.allocate(batch, torch.device("cpu"))
    made.temperatures.fill_(temperature)
    made.top_ks.fill_(top_k)
    made.top_ps.fill_(top_p)
    made.min_ps.fill_(min_p)
    return made


def all_coins(rows: int, cycles: int) -> torch.Tensor:
    return torch.cat([coins(torch.tensor([cycle], dtype=torch.int32), rows) for cycle in range(cycles)])


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a token without probability was drawn"
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


def test_coins_are_uniform_and_differ_by_row_and_cycle() -> None:
    values = all_coins(5, 4000)
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values.float(), 16, 0, 1).double()
    assert chi_square(counts, torch.full((16,), len(values) / 16, dtype=torch.float64)) < LIMIT
    assert len(values.unique()) == len(values)
    by_row = values.view(-1, 5)
    for shifted in (by_row[:, 1:] * by_row[:, :-1], by_row[1:] * by_row[:-1]):
        # Independent uniform variates: the mean of their product is 1/4.
        assert abs(float(shifted.mean()) - 0.25) < 0.01


def test_coins_repeat_by_counter_also_where_it_is_negative() -> None:
    counter = torch.tensor([-7], dtype=torch.int32)
    assert torch.equal(coins(counter, 9), coins(counter, 9))
    assert not torch.equal(coins(counter, 9), coins(counter + 1, 9))


@pytest.mark.parametrize(
    "filters",
    (
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ),
)
def test_draws_have_the_plain_distribution(filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(4)
    row = torch.randn(16, generator=generator) * 1.5
    sampling = parameters(1, **filters)  # type: ignore[arg-type]
    logits = row.expand(DRAWS, 16)
    tokens, _ = choose(logits, sampling, all_coins(50, DRAWS // 50))
    expected = filtered_probabilities(
        row.unsqueeze(0), sampling.temperatures.view(1, 1), sampling.top_ks, sampling.top_ps, sampling.min_ps
    )[0]
    assert chi_square(torch.bincount(tokens, minlength=16).double(), expected.double() * DRAWS) < LIMIT


def test_chains_have_the_targets_distribution() -> None:
    """Two tokens of output by draws and acceptance equal two plain draws, whatever the draft proposes."""
    generator = torch.Generator().manual_seed(6)
    first, second = torch.randn(4, generator=generator), torch.randn(4, 4, generator=generator)
    p1, p2 = first.softmax(0).double(), second.softmax(1).double()
    cycles, draft = DRAWS, 2
    logits = torch.stack([first, second[draft]]).repeat(cycles, 1)
    tokens, _ = choose(logits, parameters(cycles), all_coins(2, cycles))
    chosen = tokens.view(cycles, 2)
    candidates = torch.tensor([[0, draft]]).repeat(cycles, 1)
    found = accept_chain(candidates, chosen)
    counts = torch.bincount(found.tokens[:, 0].long(), minlength=4).double()
    assert chi_square(counts, p1 * cycles) < LIMIT
    kept = found.kept == 2
    behind = torch.bincount(found.tokens[kept, 1].long(), minlength=4).double()
    assert chi_square(behind, p2[draft] * int(kept.sum())) < LIMIT


def test_greedy_rows_take_the_argmax_and_bad_rows_are_told() -> None:
    logits = torch.randn(6, 9)
    logits[1, 4], logits[3], logits[5, 2] = float("nan"), float("-inf"), float("inf")
    tokens, maxima = choose(logits, parameters(2, top_k=1), all_coins(6, 1))
    for row in (0, 2, 4):
        assert int(tokens[row]) == int(logits[row].argmax())
    assert torch.isfinite(maxima).tolist() == [True, False, True, False, True, False]
    assert tokens.min() >= 0 and tokens.max() < 9
