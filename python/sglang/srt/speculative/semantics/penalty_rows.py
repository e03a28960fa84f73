"""Penalties for every row of a verify, and their state after the accept.

A penaliser's state covers the output *without* the bonus token, because the bonus is candidate 0 of the next
verify. So row ``t``'s history is the state plus its ancestors among the candidates (row 0: the bonus), and
after the accept the state grows by exactly the accepted candidates. All of it runs on the device: with
overlapped scheduling the host does not know the accepted tokens when the next verify is launched.

Shapes: ``B`` requests, ``T`` rows each, ``V`` vocabulary. ``logits`` is ``[B, T, V]`` and changed in place;
``tokens`` int64 ``[B, T]``; ``counts`` int64 ``[B, T, T]`` from ``verify_tree.repeats``.
"""

from __future__ import annotations

import torch


def _levels(state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """State at the candidates: ``[B, V]`` gathered to ``[B, T, T]`` (every row sees all candidates)."""
    rows = tokens.shape[1]
    return state.gather(1, tokens).unsqueeze(1).expand(-1, rows, -1)


def _columns(tokens: torch.Tensor) -> torch.Tensor:
    rows = tokens.shape[1]
    return tokens.unsqueeze(1).expand(-1, rows, -1)


def subtract_frequency(
    logits: torch.Tensor,
    state: torch.Tensor,
    factor: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Subtract ``factor`` once per occurrence: ``state`` ``[B, V]`` so far, ``factor`` ``[B, 1]``.

    The candidates' share is added one occurrence at a time, as plain decoding adds it, so that both round
    alike.
    """
    columns = _columns(tokens)
    picked = logits.gather(2, columns)
    level = _levels(state, tokens).clone()
    for occurrence in range(tokens.shape[1]):
        level = torch.where(counts > occurrence, level + factor.unsqueeze(2), level)
    logits.sub_(state.unsqueeze(1))
    logits.scatter_(2, columns, (picked - level).to(logits.dtype))


def subtract_presence(
    logits: torch.Tensor,
    state: torch.Tensor,
    factor: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Subtract ``factor`` from every token that occurred at all."""
    columns = _columns(tokens)
    picked = logits.gather(2, columns)
    level = torch.where(counts > 0, factor.unsqueeze(2), _levels(state, tokens))
    logits.sub_(state.unsqueeze(1))
    logits.scatter_(2, columns, (picked - level).to(logits.dtype))


def scale_repetition(
    logits: torch.Tensor,
    state: torch.Tensor,
    factor: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Divide positive and multiply negative logits of every token that occurred by its factor."""
    columns = _columns(tokens)
    picked = logits.gather(2, columns)
    level = torch.where(counts > 0, factor.unsqueeze(2), _levels(state, tokens))
    logits.copy_(_scaled(logits, state.unsqueeze(1)))
    logits.scatter_(2, columns, _scaled(picked, level).to(logits.dtype))


def _scaled(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.where(values < 0, values * factor, values / factor)


def block_stops(
    logits: torch.Tensor,
    produced: torch.Tensor,
    minimum: torch.Tensor,
    penalty: torch.Tensor,
    depth: torch.Tensor,
) -> None:
    """Keep stop tokens out of every row that lies before ``minimum`` output tokens.

    Args:
        logits: changed in place.
        produced: int ``[B, 1]``, output tokens without the bonus.
        minimum: int ``[B, 1]``, ``min_new_tokens``.
        penalty: float ``[B, V]``, -inf at stop tokens and 0 elsewhere.
        depth: int ``[B, T]``, candidates in each row's history (row 0: 1, the bonus).
    """
    blocked = (produced + depth) < minimum
    logits.add_(torch.where(blocked.unsqueeze(2), penalty.unsqueeze(1), 0.0))


def grow_frequency(
    state: torch.Tensor, factor: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor
) -> None:
    """Add the accepted candidates (``valid`` bool ``[B, T]``) to a frequency state, in place."""
    for column in range(tokens.shape[1]):
        amount = torch.where(valid[:, column : column + 1], factor, torch.zeros_like(factor))
        state.scatter_add_(1, tokens[:, column : column + 1], amount)


def grow_presence(
    state: torch.Tensor, factor: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor
) -> None:
    """Mark the accepted candidates in a presence or repetition state, in place.

    One column at a time: a single scatter with a rejected and an accepted copy of the same token would
    leave the outcome to chance.
    """
    for column in range(tokens.shape[1]):
        index = tokens[:, column : column + 1]
        state.scatter_(1, index, torch.where(valid[:, column : column + 1], factor, state.gather(1, index)))
