# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Stage two in Triton: weigh the partial results of a request's splits by their log-sum-exp and add them up.

Rows x value chunks run in parallel; the order of the sum is fixed by the split index, so repeats are bitwise
equal. This form serves the interpreter and is the reference of ``merge_gpu``, which runs on devices.
"""

from __future__ import annotations

import triton
import triton.language as tl
from sglang.srt.layers.attention.verify.schedule import locate_request
from triton.language.extra import cuda


@triton.jit
def merge_kernel(
    partial,
    partial_lse,
    out,
    lse,
    seq_lens,
    req_pool_indices,
    value_scale,
    batch,
    target,
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROUNDS: tl.constexpr,
    BATCH_LANES: tl.constexpr,
    LENS_INCLUDE_NEW: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    GRAIN: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    EARLY_MERGE: tl.constexpr,
):
    """Grid (batch * tokens * heads, ceil(DIM / BLOCK_D)). Requests with one split are already in ``out``.

    Padding requests (no keys) get zeros and an LSE of -inf. Only items in use are read: the rest of the
    workspace may hold anything. ``value_scale`` multiplies the result; ROUNDS is ``merge_gpu``'s, one here.
    """
    LN2: tl.constexpr = 0.6931471805599453
    rows: tl.constexpr = TOKENS * Q_HEADS
    row = tl.program_id(0)
    b = row // rows
    first, count = locate_request(
        tl.arange(0, BATCH_LANES), b, seq_lens, req_pool_indices, batch, target,
        BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
    )  # fmt: skip
    # Every program must wait, also one with nothing to do: this grid's completion stands for the split's.
    if EARLY_MERGE:
        cuda.gdc_wait()
    if count == 1:
        return
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    d_ok = d < DIM
    item = first * rows + row % rows
    acc = tl.zeros([BLOCK_D], tl.float32)
    norm = 0.0
    m = -1.0e30
    for start in range(0, count, BLOCK_S):
        ok = start + s < count
        index = item + (start + s) * rows
        log_sum = tl.load(partial_lse + index, mask=ok, other=float("-inf"))
        value = tl.load(
            partial + index.to(tl.int64)[:, None] * DIM + d[None, :],
            mask=ok[:, None] & d_ok[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(log_sum, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(log_sum - m_new)
        norm = norm * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * value.to(tl.float32), 0)
        m = m_new
    result = acc * tl.where(norm > 0, value_scale / norm, 0.0)
    tl.store(out + row.to(tl.int64) * DIM + d, result.to(out.dtype.element_ty), mask=d_ok)
    if HAS_LSE and tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(norm > 0, (m + tl.log2(norm)) * LN2, float("-inf")))
