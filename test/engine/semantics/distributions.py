"""Reference distributions and the chi-square test, independent of the code under test."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def filtered(
    logits: Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int = 1 << 30,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Plain decoding's distribution: all three filters look at the unfiltered, sorted probabilities."""
    scaled = torch.tensor(logits, dtype=torch.float64) / temperature
    probabilities = torch.softmax(scaled, 0).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept, before = set(), 0.0
    for rank, i in enumerate(order):
        if rank < top_k and before <= top_p and probabilities[i] >= min_p * probabilities[order[0]]:
            kept.add(i)
        before += probabilities[i]
    total = sum(probabilities[i] for i in kept)
    return [probabilities[i] / total if i in kept else 0.0 for i in range(len(probabilities))]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The statistic, and the value it exceeds once in a million draws of such tables.

    Args:
        counts: observed, any shape.
        expected: probabilities of the same shape; a cell of probability 0 must stay empty.

    Returns:
        (statistic, bound). The bound is the Wilson-Hilferty approximation of the chi-square quantile.
    """
    counts, expected = counts.double().flatten(), expected.double().flatten() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability zero was drawn"
    cells = expected > 0
    statistic = float(((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    if freedom == 0:
        return statistic, 1e-9
    deviate = 4.7534  # standard normal quantile of 1 - 1e-6
    spread = 2 / (9 * freedom)
    bound = freedom * (1 - spread + deviate * spread**0.5) ** 3
    # Shown by ``pytest -s``: the figure itself, not only that it passed.
    print(f"chi-square {statistic:.1f} over {freedom} degrees of freedom, bound {bound:.1f}")
    return statistic, bound
