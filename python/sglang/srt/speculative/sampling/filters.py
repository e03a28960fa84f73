"""The distribution that plain decoding draws from, after temperature, top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["filtered_probabilities"]


def filtered_probabilities(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Return normalised probabilities, float32 [rows, vocabulary].

    All three filters look at the same unfiltered, sorted probabilities, as the plain sampler's do: a token stays if its
    rank is below top-k, the mass in front of it is at most top-p, and it has min-p of the best token's probability.

    Args:
        logits: [rows, vocabulary].
        temperatures: positive, [rows, 1].
        top_ks, top_ps, min_ps: [rows]. A row with top-k 1 is greedy: all mass lies on the argmax of the logits,
            the first one if several tie.
    """
    probabilities = torch.softmax(logits.float() / temperatures, dim=-1)
    ordered, token = probabilities.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    before = ordered.cumsum(dim=-1) - ordered
    keep = rank < top_ks.unsqueeze(1)
    keep &= before <= top_ps.unsqueeze(1)
    keep &= ordered >= ordered[:, :1] * min_ps.unsqueeze(1)
    kept = torch.zeros_like(probabilities).scatter_(1, token, torch.where(keep, ordered, 0.0))
    greedy = (top_ks <= 1).unsqueeze(1)
    best = torch.zeros_like(kept).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, best, kept / kept.sum(dim=-1, keepdim=True))
