"""Rows whose logits are no longer numbers, and how much of a run they leave."""

from __future__ import annotations

import math

import torch


def bad_rows(logits: torch.Tensor) -> torch.Tensor:
    """Rows from which nothing can be chosen: a NaN or +inf anywhere, or nothing but -inf.

    Args:
        logits: ``[R, V]``; masks may have written -inf into some columns.

    Returns:
        bool ``[R]``. The row maximum tells all three cases: NaN and +inf win it, and only a row of -inf has
        -inf as its maximum.
    """
    return ~torch.isfinite(logits.amax(dim=-1))


def good_tokens(bad: torch.Tensor, accept_index: torch.Tensor) -> torch.Tensor:
    """Accepted tokens of each request that came from good rows, counted up to the first bad one.

    Args:
        bad: bool ``[R]`` for all rows of the batch.
        accept_index: int ``[B, D]``, accepted rows in path order, -1 where none.

    Returns:
        int32 ``[B]``. Bad rows of rejected drafts do not count: plain decoding would not have come there.
    """
    good = (accept_index >= 0) & ~bad[accept_index.clamp(min=0).long()]
    return good.int().cumprod(-1).sum(-1, dtype=torch.int32)


def good_run(logits: torch.Tensor, accept_index: torch.Tensor) -> torch.Tensor:
    """``good_tokens`` of the rows of ``logits`` (``[R, V]``), in two launches where there is a GPU."""
    if logits.is_cuda and accept_index.is_contiguous():
        from sglang.srt.speculative.semantics.nonfinite_kernel import good_tokens_from_maxima

        return good_tokens_from_maxima(logits.amax(dim=-1), accept_index)
    return good_tokens(bad_rows(logits), accept_index)


def row_maxima(logits: torch.Tensor, *, level: bool) -> torch.Tensor:
    """The maximum of each row, of which ``is_bad`` tells a bad row; with ``level`` bad rows become 0 in place.

    A sampler may fail on NaN, and with it the whole batch. Maxima instead of flags, because they are one launch and
    the host can judge them.

    Args:
        logits: ``[R, V]``; changed in place only with ``level``.
        level: a draw follows.

    Returns:
        ``[R]`` with the dtype and on the device of ``logits``; one launch on a GPU, two with ``level``, no wait.
    """
    maxima = logits.amax(dim=-1)
    if not level:
        return maxima
    if logits.is_cuda and logits.stride(-1) == 1:
        from sglang.srt.speculative.semantics.nonfinite_kernel import level_bad_rows

        level_bad_rows(maxima, logits)
    else:
        logits.masked_fill_(~torch.isfinite(maxima).unsqueeze(-1), 0.0)
    return maxima


def is_bad(maximum: float) -> bool:
    """Whether a row with this maximum is bad; see ``bad_rows``."""
    return not math.isfinite(maximum)
