"""Rejection sampling of a chain of drafts (Leviathan et al. 2023; Chen et al. 2023).

A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)). After the first rejection the next
token is drawn from the part of p that q does not cover; after a full chain, from p. The tokens are then distributed as
if each had been drawn from p, whatever q is; a q near p only makes the runs longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw", "residual", "verify_chain"]


def draw(probabilities: Tensor, coins: Tensor) -> Tensor:
    """Return one token a row by inverting the distribution function, int64 [rows].

    Args:
        probabilities: [rows, vocabulary]; a row needs a positive sum, which need not be 1.
        coins: uniform in [0, 1), [rows].
    """
    total = probabilities.double().cumsum(dim=-1)
    # Strictly greater: a coin of exactly 0 must not choose a token of probability 0 at the front.
    place = torch.searchsorted(total, coins.double().unsqueeze(1) * total[:, -1:], right=True).squeeze(1)
    # Rounding can push the product to the full sum: the last token with mass takes it, never one without.
    last = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(place, last)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return the part of `target` that `draft` does not cover, unnormalised, same shape.

    Where nothing is left (the two agree to the last bit, so that a rejection was a rounding accident), `target` itself.
    """
    left = (target - draft.nan_to_num(0.0)).clamp(min=0.0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, left, target)


def verify_chain(
    target: Tensor, draft: Tensor, tokens: Tensor, coins: Tensor, final_coins: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain and draw the token after it.

    Args:
        target: probabilities after the bonus token and after each draft, [bs, drafts + 1, vocabulary].
        draft: the distribution each draft was drawn from, [bs, drafts, vocabulary].
        tokens: the drafts, int64 [bs, drafts].
        coins: uniform in [0, 1), one a draft, [bs, drafts].
        final_coins: uniform in [0, 1), [bs].

    Returns:
        Accepted drafts, int64 [bs] in [0, drafts], and the token that follows them, int64 [bs].
    """
    bs, drafts = tokens.shape
    p = torch.gather(target[:, :drafts], 2, tokens.unsqueeze(2)).squeeze(2)
    q = torch.gather(draft, 2, tokens.unsqueeze(2)).squeeze(2).nan_to_num(0.0)
    # coin < p / q without the division; a token of target probability 0 is never accepted, also at coin 0.
    accepted = (coins * q < p).long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(bs, device=tokens.device)
    here = target[row, accepted]
    covered = draft[row, accepted.clamp(max=drafts - 1)]
    remaining = torch.where((accepted < drafts).unsqueeze(1), residual(here, covered), here)
    return accepted, draw(remaining, final_coins)
