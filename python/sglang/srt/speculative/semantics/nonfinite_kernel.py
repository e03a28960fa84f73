# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What follows from the row maxima, one kernel each: counts of good tokens, zeros in bad rows.

On a GPU PyTorch's small operators would cost the host more than the model's graph does. Both can be captured: nothing is
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
def _level_rows_kernel(row_max, logits, stride, columns, BLOCK: tl.constexpr):
    """One program a row: zeros in place of a bad row."""
    row = tl.program_id(0)
    top = tl.load(row_max + row).to(tl.float32)
    if not ((top > float("-inf")) & (top < float("inf"))):
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), tl.float32).to(logits.dtype.element_ty)
            tl.store(logits + row.to(tl.int64) * stride + column, zeros, mask=column < columns)


def level_bad_rows(row_max: torch.Tensor, logits: torch.Tensor) -> None:
    """Zeros in those rows of ``logits`` whose maximum is not finite.

    Args:
        row_max: float ``[R]``, contiguous, the largest logit of each row.
        logits: ``[R, V]`` with unit stride along V; changed in place.
    """
    rows, columns = logits.shape
    if rows:
        _level_rows_kernel[(rows,)](row_max, logits, logits.stride(0), columns, BLOCK=1024)
