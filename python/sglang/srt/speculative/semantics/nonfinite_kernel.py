# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""``good_tokens`` and ``flag_rows`` behind the row maxima, one kernel each.

On a GPU their small operators would cost the host more than the model's graph does. Both can be captured: nothing is
read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _good_tokens_kernel(row_max, accept_index, good, depth, WIDTH: tl.constexpr):
    """One program a request: accepted rows in path order, counted up to the first whose maximum is not finite."""
    request = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    row = tl.load(accept_index + request * depth + lane, mask=lane < depth, other=-1)
    top = tl.load(row_max + row, mask=row >= 0, other=float("inf")).to(tl.float32)
    # NaN fails both comparisons.
    fine = (top > float("-inf")) & (top < float("inf"))
    first_bad = tl.min(tl.where(fine, WIDTH, lane), 0)
    tl.store(good + request, tl.minimum(first_bad, depth))


def good_tokens_from_maxima(row_max: torch.Tensor, accept_index: torch.Tensor) -> torch.Tensor:
    """The same counts as ``good_tokens(~isfinite(row_max), accept_index)``.

    Args:
        row_max: float ``[R]``, the largest logit of each row.
        accept_index: int ``[B, D]`` with contiguous rows, accepted rows in path order, -1 where none.

    Returns:
        int32 ``[B]``.
    """
    batch, depth = accept_index.shape
    good = torch.empty(batch, dtype=torch.int32, device=accept_index.device)
    if batch:
        _good_tokens_kernel[(batch,)](
            row_max, accept_index, good, depth, WIDTH=triton.next_power_of_2(max(1, depth))
        )
    return good


@triton.jit
def _flag_rows_kernel(row_max, bad, logits, stride, columns, LEVEL: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row: its flag, and zeros in place of a bad row."""
    row = tl.program_id(0)
    top = tl.load(row_max + row).to(tl.float32)
    fine = (top > float("-inf")) & (top < float("inf"))
    tl.store(bad + row, ~fine)
    if LEVEL:  # noqa: SIM102 - one is known when compiling, the other is a tensor
        if not fine:
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), tl.float32).to(logits.dtype.element_ty)
                tl.store(logits + row.to(tl.int64) * stride + column, zeros, mask=column < columns)


def flags_from_maxima(row_max: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """The same flags as ``~isfinite(row_max)``, and zeros in the bad rows of ``logits`` where it is given.

    Args:
        row_max: float ``[R]``, contiguous, the largest logit of each row.
        logits: ``[R, V]`` with unit stride along V, or None to change nothing.

    Returns:
        bool ``[R]``.
    """
    rows = row_max.shape[0]
    bad = torch.empty(rows, dtype=torch.bool, device=row_max.device)
    if rows:
        target = row_max if logits is None else logits
        stride = 0 if logits is None else logits.stride(0)
        columns = 0 if logits is None else logits.shape[1]
        _flag_rows_kernel[(rows,)](
            row_max, bad, target, stride, columns, LEVEL=logits is not None, BLOCK=1024
        )
    return bad
