"""The distribution of the shipped model's tokens after a verify, 200,000 draws a position (E10)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.speculative.semantics.row_sampling import draw_rows, per_row

from .distributions import chi_square, filtered
from .test_sampling import TorchSampler, info_for

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "models"))

pytestmark = pytest.mark.slow
DRAWS, CHUNK, TOP = 200_000, 10_000, 12
SETTINGS: list[dict[str, Any]] = [{}, dict(top_p=0.8), dict(top_k=7, min_p=0.02, temperature=2.0)]


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    """Logits of the three rows of a verify: the row behind the prompt, and those behind two drafts."""
    from measure import load_pair

    target, _, tokenizer = load_pair(ROOT / "models/nano", ROOT / "models/nano-eagle3")
    ids = tokenizer.encode("Once upon a time there was a").ids
    with torch.no_grad():
        logits: torch.Tensor = target(torch.tensor([ids]))[0]
    return logits.reshape(-1, logits.shape[-1])[-3:].float()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_top_tokens(rows: torch.Tensor, settings: dict[str, Any]) -> None:
    """Chi-square over the most probable tokens and all others together, for each row."""
    torch.manual_seed(21)
    counts = torch.zeros(len(rows), rows.shape[-1])
    parameters = per_row(info_for(CHUNK // len(rows), **settings), len(rows))
    batch = rows.repeat(CHUNK // len(rows), 1)
    for _ in range(DRAWS * len(rows) // len(batch) + 1):
        drawn = draw_rows(batch, parameters, torch.zeros(len(batch)), TorchSampler()).reshape(-1, len(rows))
        for row in range(len(rows)):
            counts[row] += torch.bincount(drawn[:, row], minlength=rows.shape[-1])
    for row, logits in enumerate(rows):
        expected = torch.tensor(filtered(logits.tolist(), **settings))
        assert counts[row][expected == 0].sum() == 0
        top = expected.topk(TOP).indices
        folded = [
            torch.cat([x[top], (x.sum() - x[top].sum()).clamp(min=0).reshape(1)])
            for x in (counts[row], expected)
        ]
        if folded[1][-1] < 1e-9:
            folded = [x[:-1] for x in folded]
        assert counts[row].sum() >= DRAWS
        statistic, bound = chi_square(*folded)
        assert statistic < bound, row
