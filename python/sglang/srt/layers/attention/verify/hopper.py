# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Stage one for absorbed MLA on Hopper, in Gluon: the same function as ``split.split_kernel``, explicit schedule.

Four producer warps copy tiles of 64 keys into a ring, the consumer warps multiply. The split of roles is what
makes the copies overlap: a consumer must fence its probabilities into the async proxy, and that fence waits for
every load its thread still has in flight.

One tile in shared memory serves both products: S^T = K Q^T reads it as [64 keys, 576], O^T = V^T P^T reads its
first 512 columns transposed. For fp8 the ring holds raw bytes and the consumer widens a tile to fp16 (exact for
e4m3) before it multiplies; queries are scaled into fp16 range by a power of two a row.
"""

from __future__ import annotations

from sglang.srt.layers.attention.verify import stamps
from sglang.srt.layers.attention.verify.hopper_copy import PRODUCER_WARPS, copy_rows, find_work, produce
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

PRODUCER_REGISTERS = gl.constexpr(88)


@gluon.jit
def _consume(
    q, out, lse, partial, partial_lse, seq_lens, req_pool_indices, batch, target,
    stride_q_token, stride_q_head, score_scale, value_scale,
    ring_main, ring_extra, wide_main, wide_extra, qm, qe, ps, full, empty, trace,
    HEADS: gl.constexpr, BLOCK_R: gl.constexpr, HAS_LSE: gl.constexpr, LSE_ITEMS: gl.constexpr,
    FP8: gl.constexpr, STAGES: gl.constexpr, CHAIN: gl.constexpr,
    BATCH_LANES: gl.constexpr, TOKENS: gl.constexpr, LENS_INCLUDE_NEW: gl.constexpr, HAS_TABLE: gl.constexpr,
    GRAIN: gl.constexpr, MIN_KEYS: gl.constexpr,
):  # fmt: skip
    """Consumer partition: both products of every tile, online softmax, result of the split."""
    b, _, count, length, lo, hi = find_work(
        seq_lens, req_pool_indices, batch, target,
        BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
    )  # fmt: skip
    # Every program waits, also one without work: the end of this grid stands for the end of those before it.
    if CHAIN:
        cuda.gdc_wait()
    if trace is not None:
        stamps.stamp(trace, stamps.WAIT_OVER)
    if lo < hi:
        _consume_split(
            q, out, lse, partial, partial_lse, b, count, length, lo, hi,
            stride_q_token, stride_q_head, score_scale, value_scale,
            ring_main, ring_extra, wide_main, wide_extra, qm, qe, ps, full, empty, trace,
            HEADS, BLOCK_R, HAS_LSE, LSE_ITEMS, FP8, STAGES, TOKENS,
        )  # fmt: skip
    if trace is not None:
        stamps.stamp_end(trace, gl.maximum(hi - lo, 0))


@gluon.jit
def _consume_split(
    q, out, lse, partial, partial_lse, b, count, length, lo, hi,
    stride_q_token, stride_q_head, score_scale, value_scale,
    ring_main, ring_extra, wide_main, wide_extra, qm, qe, ps, full, empty, trace,
    HEADS: gl.constexpr, BLOCK_R: gl.constexpr, HAS_LSE: gl.constexpr, LSE_ITEMS: gl.constexpr,
    FP8: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Keys [lo, hi) of request ``b`` for this program's rows."""
    row0 = gl.program_id(1) * BLOCK_R
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = 64
    ROWS: gl.constexpr = TOKENS * HEADS
    TILE: gl.constexpr = qm.dtype
    LOG2E: gl.constexpr = 1.4426950408889634
    LN2: gl.constexpr = 0.6931471805599453
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BLOCK_R // (W // 4), 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BLOCK_R, 16])
    LM: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    LE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])

    rm = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, LM))
    re = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, LE))
    q_base = q + b.to(gl.int64) * TOKENS * stride_q_token
    q_m = q_base + (rm // HEADS) * stride_q_token + (rm % HEADS) * stride_q_head
    q_e = q_base + (re // HEADS) * stride_q_token + (re % HEADS) * stride_q_head
    row = row0 + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, LS))
    if FP8:
        dm = gl.arange(0, 512, layout=gl.SliceLayout(0, LM))
        de = gl.arange(0, 64, layout=gl.SliceLayout(0, LE))
        xm = gl.load(q_m[:, None] + dm[None, :], mask=(rm < ROWS)[:, None], other=0.0).to(gl.float32)
        xe = gl.load(q_e[:, None] + (512 + de)[None, :], mask=(re < ROWS)[:, None], other=0.0).to(gl.float32)
        top_e = gl.convert_layout(gl.max(gl.abs(xe), 1), gl.SliceLayout(1, LM))
        top = gl.maximum(gl.max(gl.abs(xm), 1), top_e)
        # A power of two, so scaling is exact and undoing it too; clamped so that it stays a normal number.
        power = gl.exp2(gl.ceil(gl.log2(gl.minimum(gl.maximum(top, 1.0e-30), 1.0e30))))
        qm.store((xm / power[:, None]).to(TILE))
        qe.store((xe / gl.convert_layout(power, gl.SliceLayout(1, LE))[:, None]).to(TILE))
        scale = gl.convert_layout(power, gl.SliceLayout(0, LS)) * (score_scale * LOG2E)
    else:
        copy_rows(qm, qe, q_m, q_e, rm < ROWS, re < ROWS, LM, LE)
        async_copy.commit_group()
        async_copy.wait_group(0)
        scale = gl.full([BLOCK_R], score_scale * LOG2E, gl.float32, gl.SliceLayout(0, LS))

    if trace is not None:
        stamps.stamp(trace, stamps.INPUTS_THERE)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, LS))
    limit = gl.minimum(hi, length - TOKENS + row // HEADS + 1)
    m = gl.full([BLOCK_R], -1.0e30, gl.float32, gl.SliceLayout(0, LS))
    total = gl.zeros([N, BLOCK_R], gl.float32, LS)
    zero = gl.zeros([N, BLOCK_R], gl.float32, LS)
    acc = gl.zeros([512, BLOCK_R], gl.float32, LO)
    stage = 0
    phase = 0
    for start in range(lo, hi, N):
        mbarrier.wait(full.index(stage), phase)
        if trace is not None:
            if start == lo:
                stamps.stamp(trace, stamps.FIRST_KEYS_THERE)
            stamps.stamp(trace, stamps.LAST_KEYS_THERE)
        if FP8:
            # Eight elements a thread: its fp16 then is one 16-byte store, and a warp's stores meet no bank twice.
            raw_m = ring_main.index(stage).load(LM)
            raw_e = ring_extra.index(stage).load(LE)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage))
            tile_m = wide_main
            tile_e = wide_extra
            tile_m.store(raw_m.to(TILE))
            tile_e.store(raw_e.to(TILE))
        else:
            tile_m = ring_main.index(stage)
            tile_e = ring_extra.index(stage)
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
            mbarrier.arrive(empty.index(stage))
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)

    if trace is not None:
        stamps.stamp(trace, stamps.PRODUCTS_DONE)
    norm = gl.sum(total, 0)
    scale_out = gl.where(norm > 0, (value_scale if count == 1 else 1.0) / norm, 0.0)
    result = acc * gl.convert_layout(scale_out, gl.SliceLayout(0, LO))[None, :]
    log_sum = gl.where(norm > 0, m + gl.log2(norm), float("-inf"))
    # Turned through the queries' memory, so that every row leaves as whole lines.
    turned = qm._reinterpret(out.dtype.element_ty, [BLOCK_R, 512], qm.layout)
    if count == 1:
        turned.store(gl.permute(result, (1, 0)).to(out.dtype.element_ty))
        gl.thread_barrier()
        at = b.to(gl.int64) * ROWS
        gl.store(
            out + (at + rm)[:, None] * 512 + gl.arange(0, 512, layout=gl.SliceLayout(0, LM))[None, :],
            turned.load(LM),
            mask=(rm < ROWS)[:, None],
        )
        if HAS_LSE:
            gl.store(lse + at + row, log_sum * LN2, mask=row < ROWS)
    else:
        half = qm._reinterpret(partial.dtype.element_ty, [BLOCK_R, 512], qm.layout)
        half.store(gl.permute(result, (1, 0)).to(partial.dtype.element_ty))
        gl.thread_barrier()
        at = gl.program_id(0).to(gl.int64) * ROWS
        gl.store(
            partial + (at + rm)[:, None] * 512 + gl.arange(0, 512, layout=gl.SliceLayout(0, LM))[None, :],
            half.load(LM),
            mask=(rm < ROWS)[:, None],
        )
        if LSE_ITEMS:
            # Side by side for a row's merge: 17 sectors of memory at batch 1, not 132.
            gl.store(partial_lse + row * LSE_ITEMS + gl.program_id(0), log_sum, mask=row < ROWS)
        else:
            gl.store(partial_lse + at + row, log_sum, mask=row < ROWS)


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
    trace,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BATCH_LANES: gl.constexpr,
    LENS_INCLUDE_NEW: gl.constexpr,
    HAS_TABLE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    FP8: gl.constexpr,
    STAGES: gl.constexpr,
    GRAIN: gl.constexpr,
    MIN_KEYS: gl.constexpr,
    EARLY_MERGE: gl.constexpr,
    CHAIN: gl.constexpr,
    LSE_ITEMS: gl.constexpr,
):
    """Grid (work items, row blocks). Arguments as in ``split.split_kernel``; STAGES is the depth of the ring.

    ``partial`` and ``out`` have 2-byte elements; partial results do not carry ``value_scale`` yet. CHAIN: this
    kernel is itself launched with programmatic dependence on whatever runs before it. LSE_ITEMS: distance between the
    log-sum-exps of two rows, 0 where those of a split lie side by side. ``trace`` is None or takes time stamps (``stamps``).
    """
    if trace is not None:
        stamps.stamp_start(trace)
    if EARLY_MERGE:
        cuda.gdc_launch_dependents()
    N: gl.constexpr = 64
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SP: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_R if BLOCK_R < 64 else 128, 16, 2)
    TILE: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    RING: gl.constexpr = LINEAR if FP8 else SWIZZLED

    ring_main = gl.allocate_shared_memory(latent.dtype.element_ty, [STAGES, N, 512], RING)
    ring_extra = gl.allocate_shared_memory(latent.dtype.element_ty, [STAGES, N, 64], RING)
    if FP8:
        wide_main = gl.allocate_shared_memory(TILE, [N, 512], SWIZZLED)
        wide_extra = gl.allocate_shared_memory(TILE, [N, 64], SWIZZLED)
    else:
        wide_main = ring_main.index(0)
        wide_extra = ring_extra.index(0)
    qm = gl.allocate_shared_memory(TILE, [BLOCK_R, 512], SWIZZLED)
    qe = gl.allocate_shared_memory(TILE, [BLOCK_R, 64], SWIZZLED)
    ps = gl.allocate_shared_memory(TILE, [N, BLOCK_R], SP)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * PRODUCER_WARPS)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q, out, lse, partial, partial_lse, seq_lens, req_pool_indices, batch, target,
                    stride_q_token, stride_q_head, score_scale, value_scale,
                    ring_main, ring_extra, wide_main, wide_extra, qm, qe, ps, full, empty, trace,
                    HEADS, BLOCK_R, HAS_LSE, LSE_ITEMS, FP8, STAGES, CHAIN,
                    BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
                ),
            ),
            (
                produce,
                (
                    latent, seq_lens, req_pool_indices, table, indptr, batch, target, stride_table, stride_slot,
                    ring_main, ring_extra, full, empty, trace, STAGES, CHAIN,
                    BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
