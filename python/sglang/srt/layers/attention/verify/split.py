# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM108
"""Stage one in Triton: one program reads one chunk of one request's keys, once, for all of its query rows.

Operands are swapped against the usual order: S^T[keys, rows] = K Q^T and O^T[value dims, rows] = V^T P^T. A
verify batch has few rows (3 tokens x 8 heads = 24), so rows go to the N side of the tensor-core instruction,
which comes in steps of 8, and the keys and value dims fill the M side, which needs 64 on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from sglang.srt.layers.attention.verify.schedule import locate_work
from triton.language.extra import cuda


@triton.jit
def split_kernel(
    q,
    k_pool,
    out,
    lse,
    partial,
    partial_lse,
    seq_lens,
    req_pool_indices,
    table,
    indptr,
    v_pool,
    mask,
    mask_indptr,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    score_scale,
    value_scale,
    logit_cap,
    batch,
    target,
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr,
    SHARED_KV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BATCH_LANES: tl.constexpr,
    LENS_INCLUDE_NEW: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    MASK_LAYOUT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    GRAIN: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    EARLY_MERGE: tl.constexpr,
):
    """Grid (work items, row blocks x key heads). See ``KVContext`` for lengths, addressing and masks.

    ``score_scale`` is sm_scale * k_scale, ``value_scale`` multiplies the values. A request with one work item
    is written straight to ``out`` and ``lse``; otherwise the normalised partial result, not yet scaled by
    ``value_scale``, goes to ``partial`` [work, tokens * heads, DIM] and its base-2 log-sum-exp to ``partial_lse``.
    MASK_LAYOUT: 0 none, 1 [tokens, tokens] a request, 2 [tokens, length] a request at ``mask_indptr``.
    """
    if EARLY_MERGE:
        cuda.gdc_launch_dependents()
    work = tl.program_id(0)
    lanes = tl.arange(0, BATCH_LANES)
    b, pool_index, first, count, length, chunk = locate_work(
        lanes, work, seq_lens, req_pool_indices, batch, target,
        BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
    )  # fmt: skip
    lo = (work - first) * chunk
    hi = tl.minimum(length, lo + chunk)
    if lo >= hi:
        return

    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    kv_head = (tl.program_id(1) // ROW_BLOCKS).to(tl.int64)
    r = (tl.program_id(1) % ROW_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < TOKENS * GROUP
    token = r // GROUP
    head = kv_head * GROUP + r % GROUP
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q_row = q + (b * TOKENS + token).to(tl.int64) * stride_q_token + head * stride_q_head
    d_ok = d < DIM
    qt = tl.trans(tl.load(q_row[:, None] + d[None, :], mask=live[:, None] & d_ok[None, :], other=0.0))
    if EXTRA > 0:
        e = tl.arange(0, EXTRA)
        qt_extra = tl.trans(tl.load(q_row[:, None] + DIM + e[None, :], mask=live[:, None], other=0.0))

    # A row past its own position sees none of the chain; a [T, T] mask narrows that further.
    prefix = length - TOKENS
    limit = tl.minimum(hi, prefix + token + 1)
    if MASK_LAYOUT != 0:
        limit = tl.where(live, hi, hi)
    if MASK_LAYOUT == 1:
        mask_row = mask + (b * TOKENS + token) * TOKENS - prefix
    if MASK_LAYOUT == 2:
        mask_row = mask + tl.load(mask_indptr + b) + token.to(tl.int64) * length
    if HAS_TABLE:
        slots = table + pool_index.to(tl.int64) * stride_table
    else:
        slots = table + tl.load(indptr + b)

    m = tl.full([BLOCK_R], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    # Slots are read one tile ahead: the pipeliner then sees one load a tile, not two in a row.
    slot_next = tl.load(slots + lo + n, mask=lo + n < hi, other=0)
    for start in range(lo, hi, BLOCK_N):
        pos = start + n
        ok = pos < hi
        slot = slot_next.to(tl.int64)
        slot_next = tl.load(slots + pos + BLOCK_N, mask=pos + BLOCK_N < hi, other=0)
        k_row = k_pool + slot * stride_k_slot + kv_head * stride_k_head
        # Keys past the end are zero, never whatever a page tail holds: 0 * NaN would reach the sum.
        k = tl.load(k_row[:, None] + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0).to(qt.dtype)
        s = tl.dot(k, qt, input_precision="ieee")
        if EXTRA > 0:
            k_extra = tl.load(k_row[:, None] + DIM + e[None, :], mask=ok[:, None], other=0.0)
            s = tl.dot(k_extra.to(qt.dtype), qt_extra, s, input_precision="ieee")
        s = s * score_scale
        if HAS_CAP:
            s = logit_cap * (1.0 - 2.0 / (tl.exp(2.0 * s / logit_cap) + 1.0))
        seen = pos[:, None] < limit[None, :]
        if MASK_LAYOUT != 0:
            chain = (pos[:, None] >= prefix) & seen
            seen = seen & (tl.load(mask_row[None, :] + pos[:, None], mask=chain, other=1) != 0)
        s = tl.where(seen, s * LOG2E, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[None, :])
        total = total * alpha[None, :] + p
        acc = acc * alpha[None, :]
        if SHARED_KV:
            v = k
        else:
            v_row = v_pool + slot * stride_v_slot + kv_head * stride_v_head
            v = tl.load(v_row[:, None] + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0).to(qt.dtype)
        acc = tl.dot(tl.trans(v), p.to(qt.dtype), acc, input_precision="ieee")
        m = m_new

    norm = tl.sum(total, 0)
    inverse = tl.where(norm > 0, tl.where(count == 1, value_scale, 1.0) / norm, 0.0)
    result = acc * inverse[None, :]
    log_sum = tl.where(norm > 0, m + tl.log2(norm), float("-inf"))
    out_row = token * Q_HEADS + head
    if count == 1:
        out_row += b * TOKENS * Q_HEADS
        tl.store(out + out_row[None, :] * DIM + d[:, None], result.to(out.dtype.element_ty),
                 mask=live[None, :] & d_ok[:, None])  # fmt: skip
        if HAS_LSE:
            tl.store(lse + out_row, log_sum * LN2, mask=live)
    else:
        out_row += work * (TOKENS * Q_HEADS)
        tl.store(partial + out_row[None, :] * DIM + d[:, None], result.to(partial.dtype.element_ty),
                 mask=live[None, :] & d_ok[:, None])  # fmt: skip
        tl.store(partial_lse + out_row, log_sum, mask=live)
