"""Acceptance along a chain, as pure functions over tensors.

A chain holds the bonus token of the last cycle and S drafts. Row t is the target's distribution of the token behind
candidate t. The target's choice at row t (its argmax, or a draw) is kept, and the next draft with it if it is equal;
the first choice that differs from its draft is the new bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Upstream's stand-in for every token where acceptance is simulated.
FIXED_TOKEN = 100


@dataclass(frozen=True)
class Accepted:
    """Outcome of a verify for B chains of W rows.

    Attributes:
        tokens: int32 [B, W], the choices along the accepted path, 0 behind it.
        kept: int32 [B], accepted tokens with the bonus, 1 to W.
        bonus: int64 [B], the last kept token.
    """

    tokens: torch.Tensor
    kept: torch.Tensor
    bonus: torch.Tensor


def accept_chain(candidates: torch.Tensor, chosen: torch.Tensor) -> Accepted:
    """Keep choices up to the first that differs from its draft.

    Args:
        candidates: int [B, W], bonus and drafts.
        chosen: int [B, W], the target's choice at each row.
    """
    agrees = (chosen[:, :-1] == candidates[:, 1:]).int().cumprod(dim=1)
    kept = agrees.sum(dim=1, dtype=torch.int32) + 1
    return _outcome(chosen, kept)


def simulate(candidates: torch.Tensor, chosen: torch.Tensor, length: int, real_tokens: bool) -> Accepted:
    """Pretend that every request keeps ``length`` tokens, as upstream's ``SGLANG_SIMULATE_ACC_LEN`` does.

    With ``real_tokens`` the drafts of the pretended path are kept and the choice behind them is the bonus; what lies
    behind that keeps the real verify's values. Otherwise every token is ``FIXED_TOKEN``.
    """
    real = accept_chain(candidates, chosen)
    kept = torch.full_like(real.kept, length)
    if not real_tokens:
        tokens = torch.full_like(real.tokens, FIXED_TOKEN)
    else:
        row = torch.arange(chosen.shape[1], device=chosen.device)
        following = torch.cat([candidates[:, 1:], chosen[:, -1:]], dim=1)
        path = torch.where(row < length - 1, following, chosen)
        tokens = torch.where(row < length, path, real.tokens).to(torch.int32)
    last = tokens.gather(1, (kept.long() - 1).unsqueeze(1)).squeeze(1)
    return Accepted(tokens, kept, last.long())


def good_prefix(maxima: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Kept tokens of each request that came from rows of numbers, up to the first bad row, int32 [B].

    Args:
        maxima: float [B, W], the largest logit of each row with NaN counted as +inf. A row of -inf has no choice.
        kept: int32 [B].
    """
    row = torch.arange(maxima.shape[1], device=maxima.device)
    fine = torch.isfinite(maxima) & (row < kept.unsqueeze(1))
    return fine.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def _outcome(chosen: torch.Tensor, kept: torch.Tensor) -> Accepted:
    row = torch.arange(chosen.shape[1], device=chosen.device)
    tokens = torch.where(row < kept.unsqueeze(1), chosen, 0).to(torch.int32)
    bonus = chosen.gather(1, (kept.long() - 1).unsqueeze(1)).squeeze(1)
    return Accepted(tokens, kept, bonus.long())
