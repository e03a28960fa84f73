# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Up to four rows times a large weight, from registers alone.

The library's kernel for this product takes the whole shared memory of every multiprocessor for as long as the weight
takes to read, so nothing runs beside it. This one reads the same bytes at a part of the bandwidth, with no shared memory
and few registers, so that another stream's kernels find room on the same multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_ROWS = 4
# Columns and products of a step that one program holds, steps in flight, warps. One column a warp.
COLUMNS, DEPTH, UNROLL, WARPS = 4, 256, 8, 4


@triton.jit
def _row(x, row, x_stride, place, mask, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """A row's values once for every column: both operands then arrive in one layout, without an exchange."""
    at = tl.broadcast_to(x + row * x_stride + place, [COLUMNS, DEPTH])
    return tl.load(at, mask=tl.broadcast_to(mask, [COLUMNS, DEPTH]), other=0.0).to(tl.float32)


@triton.jit
def _finish(total, bias, out, row, out_stride, at, columns, HAS_BIAS: tl.constexpr):
    value = tl.sum(total, 1)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def project_rows_kernel(
    x,
    weight,
    bias,
    out,
    columns,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """``out[r, n] = sum_k x[r, k] * weight[n, k]`` in float32; a program takes every ``PROGRAMS``-th tile of columns."""
    part = tl.arange(0, DEPTH)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(columns, COLUMNS), PROGRAMS):
        at = tile * COLUMNS + tl.arange(0, COLUMNS)
        line = weight + at[:, None].to(tl.int64) * weight_stride
        there = at[:, None] < columns
        total0 = tl.zeros([COLUMNS, DEPTH], tl.float32)
        total1, total2, total3 = total0, total0, total0
        for start in range(0, depth, DEPTH * UNROLL):
            for step in tl.static_range(UNROLL):
                place = start + step * DEPTH + part
                inside = place < depth
                w = tl.load(line + place, mask=there & inside, other=0.0).to(tl.float32)
                total0 += w * _row(x, 0, x_stride, place, inside, COLUMNS, DEPTH)
                if ROWS > 1:
                    total1 += w * _row(x, 1, x_stride, place, inside, COLUMNS, DEPTH)
                if ROWS > 2:
                    total2 += w * _row(x, 2, x_stride, place, inside, COLUMNS, DEPTH)
                if ROWS > 3:
                    total3 += w * _row(x, 3, x_stride, place, inside, COLUMNS, DEPTH)
        _finish(total0, bias, out, 0, out_stride, at, columns, HAS_BIAS)
        if ROWS > 1:
            _finish(total1, bias, out, 1, out_stride, at, columns, HAS_BIAS)
        if ROWS > 2:
            _finish(total2, bias, out, 2, out_stride, at, columns, HAS_BIAS)
        if ROWS > 3:
            _finish(total3, bias, out, 3, out_stride, at, columns, HAS_BIAS)


def project_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, programs: int
) -> None:
    """``out = x @ weight.T + bias`` for at most ``MOST_ROWS`` rows, summed in float32.

    Args:
        x: [R, K] with dense rows.
        weight: [N, K] with dense rows.
        bias: [N] or None.
        out: [R, N] with dense rows.
        programs: thread blocks, each of which occupies a part of one multiprocessor.

    Raises:
        ValueError: too many rows, or a tensor whose rows are not dense.
    """
    if not 0 < x.shape[0] <= MOST_ROWS or any(tensor.stride(1) != 1 for tensor in (x, weight, out)):
        raise ValueError(f"{tuple(x.shape)}: one to {MOST_ROWS} rows, all of them dense")
    project_rows_kernel[(programs,)](
        x, weight, weight if bias is None else bias, out, weight.shape[0], weight.shape[1],
        x.stride(0), weight.stride(0), out.stride(0),
        PROGRAMS=programs, ROWS=x.shape[0], COLUMNS=COLUMNS, DEPTH=DEPTH, UNROLL=UNROLL,
        HAS_BIAS=bias is not None, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
