# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: SIM102, SIM108
"""The warps of ``hopper.mla_split_kernel`` that copy keys, and how either role finds its work."""

from __future__ import annotations

from sglang.srt.layers.attention.verify import stamps
from sglang.srt.layers.attention.verify.schedule import locate_work
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra import cuda

PRODUCER_WARPS = gl.constexpr(4)


@gluon.jit
def copy_rows(main, extra, base_main, base_extra, ok_main, ok_extra, lm: gl.constexpr, le: gl.constexpr):
    """Start copying rows of 512 + 64 elements; rows that are not ok become zero."""
    dm = gl.arange(0, 512, layout=gl.SliceLayout(0, lm))
    de = gl.arange(0, 64, layout=gl.SliceLayout(0, le))
    async_copy.async_copy_global_to_shared(main, base_main[:, None] + dm[None, :], mask=ok_main[:, None])
    async_copy.async_copy_global_to_shared(
        extra, base_extra[:, None] + (512 + de)[None, :], mask=ok_extra[:, None]
    )


@gluon.jit
def find_work(
    seq_lens, req_pool_indices, batch, target,
    BATCH_LANES: gl.constexpr, TOKENS: gl.constexpr, LENS_INCLUDE_NEW: gl.constexpr, HAS_TABLE: gl.constexpr,
    GRAIN: gl.constexpr, MIN_KEYS: gl.constexpr,
):  # fmt: skip
    """(request, pool index, item count, length, first key, end) of this program's work, if any."""
    work = gl.program_id(0)
    lanes = gl.arange(0, BATCH_LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    b, pool_index, first, count, length, chunk = locate_work(
        lanes, work, seq_lens, req_pool_indices, batch, target,
        BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
    )  # fmt: skip
    lo = (work - first) * chunk
    return b, pool_index, count, length, lo, gl.minimum(length, lo + chunk)


@gluon.jit
def produce(
    latent, seq_lens, req_pool_indices, table, indptr, batch, target, stride_table, stride_slot,
    ring_main, ring_extra, full, empty, trace,
    STAGES: gl.constexpr, CHAIN: gl.constexpr,
    BATCH_LANES: gl.constexpr, TOKENS: gl.constexpr, LENS_INCLUDE_NEW: gl.constexpr, HAS_TABLE: gl.constexpr,
    GRAIN: gl.constexpr, MIN_KEYS: gl.constexpr,
):  # fmt: skip
    """Producer partition: keys [lo, hi) tile by tile into the ring; slots are read one tile ahead."""
    WIDTH: gl.constexpr = 128 // latent.dtype.element_ty.primitive_bitwidth
    LM: gl.constexpr = gl.BlockedLayout([1, WIDTH], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    LE: gl.constexpr = gl.BlockedLayout([1, WIDTH], [WIDTH // 2, 64 // WIDTH], [PRODUCER_WARPS, 1], [1, 0])
    N: gl.constexpr = 64
    b, pool_index, _, length, lo, hi = find_work(
        seq_lens, req_pool_indices, batch, target,
        BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
    )  # fmt: skip
    if trace is not None:
        stamps.stamp_after(trace, stamps.LENGTHS_READ, hi)
    if lo < hi:
        if HAS_TABLE:
            slots = table + pool_index.to(gl.int64) * stride_table
        else:
            slots = table + gl.load(indptr + b)
        nm = gl.arange(0, N, layout=gl.SliceLayout(1, LM))
        ne = gl.arange(0, N, layout=gl.SliceLayout(1, LE))
        slot_m = gl.load(slots + lo + nm, mask=lo + nm < hi, other=0)
        slot_e = gl.load(slots + lo + ne, mask=lo + ne < hi, other=0)
        if trace is not None:
            stamps.stamp_after(trace, stamps.SLOTS_READ, gl.max(slot_e, 0).to(gl.int32))
        stage = 0
        phase = 1
        for start in range(lo, hi, N):
            base_m = latent + slot_m.to(gl.int64) * stride_slot
            base_e = latent + slot_e.to(gl.int64) * stride_slot
            mbarrier.wait(empty.index(stage), phase)
            # Lengths, slots and older rows are older than the kernel before this one; the new rows may be its output.
            if CHAIN:
                if start + N > length - TOKENS:
                    cuda.gdc_wait()
            copy_rows(
                ring_main.index(stage), ring_extra.index(stage), base_m, base_e,
                start + nm < hi, start + ne < hi, LM, LE,
            )  # fmt: skip
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            if trace is not None:
                if start == lo:
                    stamps.stamp(trace, stamps.FIRST_COPIES_SENT)
                stamps.stamp(trace, stamps.LAST_COPIES_SENT)
            ahead = start + N
            slot_m = gl.load(slots + ahead + nm, mask=ahead + nm < hi, other=0)
            slot_e = gl.load(slots + ahead + ne, mask=ahead + ne < hi, other=0)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        async_copy.wait_group(0)
