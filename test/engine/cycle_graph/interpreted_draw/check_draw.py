"""The draw without a sort against a sorted oracle in float64, at equal variates; ``test_kernels.py`` runs it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sglang.srt.speculative.cycle_graph import draw_kernel
from sglang.srt.speculative.cycle_graph.buffers import Sampling
from sglang.srt.speculative.cycle_graph.sampled import coins


@dataclass(frozen=True)
class Case:
    """Filters of one request; ``levels`` rounds the logits, so that many are equal."""

    name: str
    temperature: float = 1.0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0
    levels: float = 0.0


CASES = (
    Case("no filter"),
    Case("cold", temperature=0.05),
    Case("hot", temperature=30.0),
    Case("greedy", top_k=1),
    Case("top-k", top_k=7),
    Case("top-k with ties", top_k=7, levels=2.0),
    Case("top-k above the vocabulary", top_k=5000),
    Case("top-p", top_p=0.7),
    Case("top-p with ties", top_p=0.3, levels=1.0),
    Case("top-p of nearly nothing", top_p=1e-6),
    Case("min-p", min_p=0.1),
    Case("min-p with ties", min_p=0.1, levels=2.0),
    Case("min-p of 1", min_p=1.0, levels=2.0),
    Case("all", temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    Case("all with ties", temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, levels=3.0),
)
ROWS, COUNTER = 3, 2


def kept(row: torch.Tensor, case: Case) -> torch.Tensor:
    """Weights of the tokens that stay, by definition: sorted, ties by token; float64 [V]."""
    if case.top_k <= 1:
        return torch.nn.functional.one_hot(row.argmax(), row.shape[0]).double()
    # The weights as the kernel has them: the filters are exact, the exponential is float32's.
    weight = ((row - row.max()) / torch.tensor(case.temperature)).exp()
    ordered, token = weight.double().sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    stays = torch.arange(row.shape[0]) < case.top_k
    stays &= before <= float(torch.tensor(case.top_p)) * ordered.sum()
    stays &= ordered >= float(torch.tensor(case.min_p))
    return torch.zeros_like(ordered).scatter_(0, token, torch.where(stays, ordered, 0.0))


def run(logits: torch.Tensor, case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    requests = logits.shape[0] // ROWS
    sampling = Sampling.allocate(requests, torch.device("cpu"))
    sampling.temperatures.fill_(case.temperature)
    sampling.top_ks.fill_(case.top_k)
    sampling.top_ps.fill_(case.top_p)
    sampling.min_ps.fill_(case.min_p)
    state = torch.tensor([9, 9, number, 9], dtype=torch.int32)
    maxima = torch.full((logits.shape[0], 3), -7.0)
    indices = torch.full((logits.shape[0], 3), -7, dtype=torch.int32)
    draw_kernel.draw(state, COUNTER, logits, sampling, maxima, indices)
    assert (maxima[:, 1:] == -7).all() and (indices[:, 1:] == -7).all()
    return maxima[:, 0], indices[:, 0].long()


def make(columns: int, case: Case, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((2 * ROWS, columns + 5), float("nan"), dtype=dtype)
    values = torch.randn(2 * ROWS, columns, generator=generator) * 2
    memory[:, :columns] = ((values * case.levels).round() / case.levels if case.levels else values).to(dtype)
    return memory[:, :columns]


# Two programs a row, the second with a tail; the last case also six.
@pytest.mark.parametrize(
    ("case", "columns"),
    [*((case, 97) for case in CASES), (CASES[-1], 331)],
    ids=lambda value: getattr(value, "name", value),
)
def test_equals_the_sorted_oracle(case: Case, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_kernel, "COLUMNS", 64)
    near = 0
    for number in range(2):
        logits = make(columns, case, number)
        maxima, tokens = run(logits, case, number)
        assert torch.equal(maxima, logits.amax(1))
        for row, coin in enumerate(
            coins(torch.tensor([number], dtype=torch.int32), logits.shape[0]).tolist()
        ):
            weights = kept(logits[row], case)
            total = weights.cumsum(0)
            assert weights[tokens[row]] > 0, "a token that a filter takes away"
            goal = coin * total[-1]
            expected = int(torch.searchsorted(total, goal, right=True))
            # The last bit of an exponential may move a boundary, and with it a variate that lies on it.
            on_a_boundary = bool(((total - goal).abs() < 1e-6 * total[-1]).any())
            near += on_a_boundary
            assert int(tokens[row]) == expected or on_a_boundary, (number, row)
    assert near <= 2


def test_bf16_rows_and_the_largest_logit() -> None:
    logits = make(331, Case("bf16"), 5, torch.bfloat16)
    maxima, tokens = run(logits, Case("greedy", top_k=1), 0)
    assert torch.equal(maxima, logits.float().amax(1))
    assert torch.equal(tokens, torch.tensor([int(row.argmax()) for row in logits.float()]))


def test_bad_rows_are_told_by_their_maximum() -> None:
    logits = make(131, Case("bad"), 6)
    logits[0, 40], logits[1], logits[2, 7], logits[3, 2] = (
        float("nan"),
        float("-inf"),
        float("inf"),
        float("-inf"),
    )
    maxima, tokens = run(logits, Case("all", top_k=9, top_p=0.5), 3)
    assert torch.isfinite(maxima).tolist() == [False, False, False, True, True, True]
    assert tokens.min() >= 0 and tokens.max() < 131 and tokens[3] != 2


@pytest.mark.parametrize("case", (CASES[0],), ids=lambda case: case.name)
def test_chi_square_against_the_oracle(case: Case) -> None:
    """216 draws from one row of 13 tokens; the quantile of 1 - 1e-6 at 12 degrees of freedom is 53."""
    row = make(13, case, 11)[0]
    weights = kept(row, case)
    tokens = torch.cat([run(row.expand(6 * ROWS, 13), case, number)[1] for number in range(12)])
    counts = torch.bincount(tokens, minlength=13).double()
    expected = weights / weights.sum() * len(tokens)
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    assert float(((counts - expected)[there] ** 2 / expected[there]).sum()) < 60


@pytest.mark.parametrize("top_k", (7, 1 << 30))
def test_a_temperature_beyond_float32_draws_numbers_of_the_row_alone(
    top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_kernel, "COLUMNS", 64)
    case = Case("infinitely hot", temperature=float("inf"), top_k=top_k)
    logits = make(97, case, 2)
    logits[:, ::2] = float("-inf")
    for number in range(3):
        _, tokens = run(logits, case, number)
        assert tokens.max() < 97 and (tokens % 2 == 1).all()


def test_control_another_threshold_is_seen() -> None:
    case, wrong = Case("top-k", top_k=3), Case("top-k", top_k=4)
    logits = make(97, case, 1)
    lost = [
        kept(logits[row], case)[token] == 0
        for n in range(3)
        for row, token in enumerate(run(logits, wrong, n)[1])
    ]
    assert any(lost)
