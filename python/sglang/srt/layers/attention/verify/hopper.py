# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Stage one for absorbed MLA on Hopper, in Gluon: the same function as ``split.split_kernel``, explicit schedule.

Triton's pipeliner either triples the 72 KiB latent tile or starts the next load after the arithmetic. Here two
tiles of 64 keys circulate: a tile's slot is refilled as soon as its second product has read it, so one to two
tiles (72 to 144 KiB) are on their way from memory at any time, which is what saturates it.

One tile in shared memory serves both products: S^T = K Q^T reads it as [64 keys, 576], O^T = V^T P^T reads its
first 512 columns transposed. For fp8 the tile arrives raw in a ring of its own and is widened to fp16 (exact
for e4m3); queries are scaled into fp16 range by a power of two a row.
"""

from __future__ import annotations

from sglang.srt.layers.attention.verify.schedule import locate_work
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda


@gluon.jit
def _issue_tile(
    main,
    extra,
    latent,
    slots_main,
    slots_extra,
    ok_main,
    ok_extra,
    stride_slot,
    lm: gl.constexpr,
    le: gl.constexpr,
):
    """Start copying one tile; rows that are not ok become zero. Commits one group."""
    dm = gl.arange(0, 512, layout=gl.SliceLayout(0, lm))
    de = gl.arange(0, 64, layout=gl.SliceLayout(0, le))
    pm = latent + slots_main.to(gl.int64)[:, None] * stride_slot + dm[None, :]
    pe = latent + slots_extra.to(gl.int64)[:, None] * stride_slot + (512 + de)[None, :]
    async_copy.async_copy_global_to_shared(main, pm, mask=ok_main[:, None])
    async_copy.async_copy_global_to_shared(extra, pe, mask=ok_extra[:, None])


@gluon.jit
def mla_split_kernel(
    q,
    latent,
    out,
    lse,
    partial,
    partial_lse,
    seq_lens,
    req_pool_indices,
    table,
    indptr,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_slot,
    score_scale,
    value_scale,
    batch,
    target,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BATCH_LANES: gl.constexpr,
    LENS_INCLUDE_NEW: gl.constexpr,
    HAS_TABLE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    FP8: gl.constexpr,
    RAW_STAGES: gl.constexpr,
    GRAIN: gl.constexpr,
    MIN_KEYS: gl.constexpr,
    SHORT_KEYS: gl.constexpr,
    SHORT_MIN: gl.constexpr,
    EARLY_MERGE: gl.constexpr,
):
    """Grid (work items, row blocks). Arguments as in ``split.split_kernel``; RAW_STAGES is for fp8 only."""
    if EARLY_MERGE:
        cuda.gdc_launch_dependents()
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = 64
    ROWS: gl.constexpr = TOKENS * HEADS
    LOG2E: gl.constexpr = 1.4426950408889634
    LN2: gl.constexpr = 0.6931471805599453
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BLOCK_R // (W // 4), 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BLOCK_R, 16])
    LM: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    LE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    KM: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [W, 1], [1, 0]) if FP8 else LM
    KE: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [W, 1], [1, 0]) if FP8 else LE
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SP: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_R if BLOCK_R < 64 else 128, 16, 2)
    TILE: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    STAGES: gl.constexpr = RAW_STAGES if FP8 else 2

    work = gl.program_id(0)
    lanes = gl.arange(0, BATCH_LANES, layout=gl.BlockedLayout([1], [32], [W], [0]))
    b, first, count, length, chunk = locate_work(
        lanes, work, seq_lens, req_pool_indices, batch, target,
        TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS, SHORT_KEYS, SHORT_MIN,
    )  # fmt: skip
    lo = (work - first) * chunk
    hi = gl.minimum(length, lo + chunk)
    if lo >= hi:
        return
    if HAS_TABLE:
        slots = table + gl.load(req_pool_indices + b).to(gl.int64) * stride_table
    else:
        slots = table + gl.load(indptr + b)

    km = gl.allocate_shared_memory(TILE, [1 if FP8 else 2, N, 512], SWIZZLED)
    ke = gl.allocate_shared_memory(TILE, [1 if FP8 else 2, N, 64], SWIZZLED)
    if FP8:
        raw_m = gl.allocate_shared_memory(latent.dtype.element_ty, [STAGES, N, 512], LINEAR)
        raw_e = gl.allocate_shared_memory(latent.dtype.element_ty, [STAGES, N, 64], LINEAR)
    else:
        raw_m = km
        raw_e = ke
    qm = gl.allocate_shared_memory(TILE, [BLOCK_R, 512], SWIZZLED)
    qe = gl.allocate_shared_memory(TILE, [BLOCK_R, 64], SWIZZLED)
    ps = gl.allocate_shared_memory(TILE, [N, BLOCK_R], SP)
    nm = gl.arange(0, N, layout=gl.SliceLayout(1, KM))
    ne = gl.arange(0, N, layout=gl.SliceLayout(1, KE))

    # Queries, then the first tiles. Slots are read ahead of the tile that uses them.
    row0 = gl.program_id(1) * BLOCK_R
    rm = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, LM))
    re = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, LE))
    dm = gl.arange(0, 512, layout=gl.SliceLayout(0, LM))
    de = gl.arange(0, 64, layout=gl.SliceLayout(0, LE))
    q_base = q + b.to(gl.int64) * TOKENS * stride_q_token
    q_m = (q_base + (rm // HEADS) * stride_q_token + (rm % HEADS) * stride_q_head)[:, None] + dm[None, :]
    q_e = (q_base + (re // HEADS) * stride_q_token + (re % HEADS) * stride_q_head)[:, None] + (512 + de)[
        None, :
    ]
    slot_m = gl.load(slots + lo + nm, mask=lo + nm < hi, other=0)
    slot_e = gl.load(slots + lo + ne, mask=lo + ne < hi, other=0)
    if not FP8:
        async_copy.async_copy_global_to_shared(qm, q_m, mask=(rm < ROWS)[:, None])
        async_copy.async_copy_global_to_shared(qe, q_e, mask=(re < ROWS)[:, None])
    ahead = lo
    for stage in gl.static_range(STAGES):
        if ahead < hi:
            _issue_tile(
                raw_m.index(stage),
                raw_e.index(stage),
                latent,
                slot_m,
                slot_e,
                ahead + nm < hi,
                ahead + ne < hi,
                stride_slot,
                KM,
                KE,
            )
        async_copy.commit_group()
        ahead += N
        slot_m = gl.load(slots + ahead + nm, mask=ahead + nm < hi, other=0)
        slot_e = gl.load(slots + ahead + ne, mask=ahead + ne < hi, other=0)
    row = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, LS))
    if FP8:
        xm = gl.load(q_m, mask=(rm < ROWS)[:, None], other=0.0).to(gl.float32)
        xe = gl.load(q_e, mask=(re < ROWS)[:, None], other=0.0).to(gl.float32)
        top = gl.maximum(
            gl.max(gl.abs(xm), 1), gl.convert_layout(gl.max(gl.abs(xe), 1), gl.SliceLayout(1, LM))
        )
        # Powers of two within fp32's own range, so scaling is exact and undoing it too.
        power = gl.exp2(gl.ceil(gl.log2(gl.minimum(gl.maximum(top, 1.0e-30), 1.0e30))))
        qm.store((xm / power[:, None]).to(TILE))
        qe.store((xe / gl.convert_layout(power, gl.SliceLayout(1, LE))[:, None]).to(TILE))
        scale = gl.convert_layout(power, gl.SliceLayout(0, LS)) * (score_scale * LOG2E)
    else:
        scale = gl.full([BLOCK_R], score_scale * LOG2E, gl.float32, gl.SliceLayout(0, LS))

    n = gl.arange(0, N, layout=gl.SliceLayout(1, LS))
    limit = gl.minimum(hi, length - TOKENS + row // HEADS + 1)
    m = gl.full([BLOCK_R], -1.0e30, gl.float32, gl.SliceLayout(0, LS))
    total = gl.zeros([N, BLOCK_R], gl.float32, LS)
    zero = gl.zeros([N, BLOCK_R], gl.float32, LS)
    acc = gl.zeros([512, BLOCK_R], gl.float32, LO)
    stage = 0
    for start in range(lo, hi, N):
        async_copy.wait_group(STAGES - 1)
        if FP8:
            # Each thread reads back the bytes it copied itself: no barrier between copy, read and refill.
            wide_m = raw_m.index(stage).load(KM).to(TILE)
            wide_e = raw_e.index(stage).load(KE).to(TILE)
            if ahead < hi:
                _issue_tile(
                    raw_m.index(stage),
                    raw_e.index(stage),
                    latent,
                    slot_m,
                    slot_e,
                    ahead + nm < hi,
                    ahead + ne < hi,
                    stride_slot,
                    KM,
                    KE,
                )
            async_copy.commit_group()
            ahead += N
            slot_m = gl.load(slots + ahead + nm, mask=ahead + nm < hi, other=0)
            slot_e = gl.load(slots + ahead + ne, mask=ahead + ne < hi, other=0)
            tile_m = km.index(0)
            tile_e = ke.index(0)
            tile_m.store(wide_m)
            tile_e.store(wide_e)
        else:
            tile_m = km.index(stage)
            tile_e = ke.index(stage)
        fence_async_shared()
        gl.thread_barrier()
        s = warpgroup_mma(tile_m, qm.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(tile_e, qe.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        s = gl.where((start + n)[:, None] < limit[None, :], s * scale[None, :], float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 0))
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s - m_new[None, :])
        # Column sums stay spread over threads until the end: one reduction a split instead of one a tile.
        total = total * alpha[None, :] + p
        m = m_new
        ps.store(p.to(TILE))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(0, LO))[None, :]
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(tile_m.permute((1, 0)), ps, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        gl.thread_barrier()
        if not FP8:
            if ahead < hi:
                _issue_tile(
                    tile_m,
                    tile_e,
                    latent,
                    slot_m,
                    slot_e,
                    ahead + nm < hi,
                    ahead + ne < hi,
                    stride_slot,
                    KM,
                    KE,
                )
            async_copy.commit_group()
            ahead += N
            slot_m = gl.load(slots + ahead + nm, mask=ahead + nm < hi, other=0)
            slot_e = gl.load(slots + ahead + ne, mask=ahead + ne < hi, other=0)
        stage += 1
        stage = gl.where(stage == STAGES, 0, stage)
    async_copy.wait_group(0)

    norm = gl.sum(total, 0)
    inverse = gl.where(norm > 0, value_scale / norm, 0.0)
    result = acc * gl.convert_layout(inverse, gl.SliceLayout(0, LO))[None, :]
    log_sum = gl.where(norm > 0, m + gl.log2(norm), float("-inf"))
    ro = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, LO))
    d = gl.arange(0, 512, layout=gl.SliceLayout(1, LO))
    if count == 1:
        at = b.to(gl.int64) * ROWS
        gl.store(
            out + (at + ro)[None, :] * 512 + d[:, None],
            result.to(out.dtype.element_ty),
            mask=(ro < ROWS)[None, :],
        )
        if HAS_LSE:
            gl.store(lse + at + row, log_sum * LN2, mask=row < ROWS)
    else:
        at = work.to(gl.int64) * ROWS
        gl.store(
            partial + (at + ro)[None, :] * 512 + d[:, None],
            result.to(partial.dtype.element_ty),
            mask=(ro < ROWS)[None, :],
        )
        gl.store(partial_lse + at + row, log_sum, mask=row < ROWS)
