# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102
"""Stage two on a device, in Gluon: the same function as ``merge.merge_kernel`` with its loads made explicit.

The merge is latency and little else. Written as plain loads, the assembler interleaves them with their use and
the latency is paid several times; here every partial result of a program is on its way to shared memory before
the first is looked at. Launched with programmatic dependent launch, blocks that fit beside the split's have
found their work before the last split ends.
"""

from __future__ import annotations

from sglang.srt.layers.attention.verify import stamps
from sglang.srt.layers.attention.verify.schedule import locate_request
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda


@gluon.jit
def merge_gpu_kernel(
    partial,
    partial_lse,
    out,
    lse,
    seq_lens,
    req_pool_indices,
    value_scale,
    batch,
    target,
    trace,
    TOKENS: gl.constexpr,
    Q_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_S: gl.constexpr,
    ROUNDS: gl.constexpr,
    LANES: gl.constexpr,
    LSE_ITEMS: gl.constexpr,
    BATCH_LANES: gl.constexpr,
    LENS_INCLUDE_NEW: gl.constexpr,
    HAS_TABLE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    GRAIN: gl.constexpr,
    MIN_KEYS: gl.constexpr,
    EARLY_MERGE: gl.constexpr,
):
    """Grid (batch * tokens * heads, ceil(DIM / BLOCK_D)); see ``merge.merge_kernel``.

    Takes up to ROUNDS blocks of BLOCK_S splits at once, as many as the request has. LANES is the power of two from
    ROUNDS * BLOCK_S on. LSE_ITEMS as in ``hopper``; ``trace`` is None or takes time stamps (``stamps``).
    """
    if trace is not None:
        stamps.stamp_start(trace)
    # The next call's first stage may start on the multiprocessors that are free already: it touches nothing of this one's
    # before it has waited.
    if EARLY_MERGE:
        cuda.gdc_launch_dependents()
    W: gl.constexpr = gl.num_warps()
    LN2: gl.constexpr = 0.6931471805599453
    ROWS: gl.constexpr = TOKENS * Q_HEADS
    VALUE: gl.constexpr = partial.dtype.element_ty
    WIDTH: gl.constexpr = 128 // VALUE.primitive_bitwidth
    ACROSS: gl.constexpr = BLOCK_D // WIDTH if BLOCK_D // WIDTH < 32 else 32
    LV: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [W, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SPLITS: gl.constexpr = BLOCK_S * ROUNDS
    row = gl.program_id(0)
    b = row // ROWS
    first, count = locate_request(
        gl.arange(0, BATCH_LANES, layout=L1), b, seq_lens, req_pool_indices, batch, target,
        BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
    )  # fmt: skip
    # Every program must wait, also one with nothing to do: this grid's completion stands for the split's.
    if trace is not None:
        stamps.stamp_after(trace, stamps.LENGTHS_READ, count)
    if EARLY_MERGE:
        cuda.gdc_wait()
    if trace is not None:
        stamps.stamp(trace, stamps.WAIT_OVER)
    if count == 1:
        return
    values = gl.allocate_shared_memory(VALUE, [ROUNDS, BLOCK_S, BLOCK_D], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [LANES // BLOCK_S, BLOCK_S], LINE)
    d = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LV))
    sv = gl.arange(0, BLOCK_S, layout=gl.SliceLayout(1, LV))
    s1 = gl.arange(0, LANES, layout=L1)
    item = first * ROWS + row % ROWS
    acc = gl.zeros([BLOCK_S, BLOCK_D], gl.float32, LV)
    norm = 0.0
    m = -1.0e30
    for start in range(0, count, SPLITS):
        rounds = gl.minimum(ROUNDS, (count - start + BLOCK_S - 1) // BLOCK_S)
        for i in range(0, rounds):
            split = start + i * BLOCK_S + sv
            source = partial + (item + split * ROWS).to(gl.int64)[:, None] * DIM + d[None, :]
            async_copy.async_copy_global_to_shared(
                values.index(i), source, mask=(split < count)[:, None] & (d < DIM)[None, :]
            )
        async_copy.commit_group()
        live = start + s1 < count
        if LANES > SPLITS:
            live = live & (s1 < SPLITS)
        if LSE_ITEMS:
            sums = partial_lse + row % ROWS * LSE_ITEMS + first + start + s1
        else:
            sums = partial_lse + item + (start + s1) * ROWS
        log_sum = gl.load(sums, mask=live, other=float("-inf"))
        m_new = gl.maximum(m, gl.max(log_sum, 0))
        alpha = gl.exp2(m - m_new)
        weight = gl.exp2(log_sum - m_new)
        weights._reinterpret(gl.float32, [LANES], LINE).store(weight)
        norm = norm * alpha + gl.sum(weight, 0)
        m = m_new
        acc = acc * alpha
        async_copy.wait_group(0)
        gl.thread_barrier()
        if trace is not None:
            stamps.stamp(trace, stamps.INPUTS_THERE)
        for i in range(0, rounds):
            spread = weights.index(i).load(gl.SliceLayout(1, LV))
            acc += spread[:, None] * values.index(i).load(LV).to(gl.float32)
        gl.thread_barrier()
    result = gl.sum(acc, 0) * gl.where(norm > 0, value_scale / norm, 0.0)
    gl.store(out + row.to(gl.int64) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)
    if HAS_LSE:
        if gl.program_id(1) == 0:
            gl.store(lse + row, gl.where(norm > 0, (m + gl.log2(norm)) * LN2, float("-inf")))
    if trace is not None:
        stamps.stamp_end(trace, count)
