"""Checks a call against its plan and launches the two stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.fused import FusedCall, attend_fused
from sglang.srt.layers.attention.verify.merge import merge_kernel
from sglang.srt.layers.attention.verify.plain import attend_plain
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.split import split_kernel
from sglang.srt.layers.attention.verify.warpgroup import attend_warpgroup
from sglang.srt.layers.attention.verify.work_list import PassList
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace


@dataclass(frozen=True)
class Operands:
    """Tensors of one call: q [rows, heads, qk dim], k and v [slots, kv heads, dim], out [rows, heads, v dim].

    ``trace``: two tensors that take the time stamps of split and merge (``stamps``; only kernels for a device have them).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    trace: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class CallForm:
    """What a call adds to its plan at compile time: how lengths count, how keys are addressed, LSE or not, stamps or not."""

    lens_include_new: bool
    has_table: bool
    has_lse: bool
    traced: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, constants and compiler options; the pointers and scalars come with ``run``."""

    kernel: Any
    grid: tuple[int, int]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self, *args: Any, **more: Any) -> None:
        """Launch on the current stream; ``more`` are arguments that not every launch has."""
        self.kernel[self.grid](*args, **more, **self.constants, **self.options)


def batch_lanes(batch: int) -> int:
    """Lanes that hold the lengths of a batch: one, or whole warps.

    Fewer lanes than a warp make Triton keep copies of every length in every thread, and the fp8 kernel then
    spilled 480 bytes in its loop (half its speed at batches of 4 and 8). It also means fewer kernels to compile.
    """
    return 1 if batch == 1 else max(32, triton.next_power_of_2(batch))


def _schedule(plan: SplitPlan, form: CallForm) -> dict[str, Any]:
    return {
        "TOKENS": plan.request.tokens,
        "BATCH_LANES": batch_lanes(plan.request.batch),
        "LENS_INCLUDE_NEW": form.lens_include_new,
        "HAS_TABLE": form.has_table,
        "HAS_LSE": form.has_lse,
        "GRAIN": plan.splits.grain,
        "MIN_KEYS": plan.splits.min_keys,
        "EARLY_MERGE": plan.early_merge,
    }


def _untraced(form: CallForm) -> dict[str, Any]:
    """An ordinary launch has no argument ``trace``: None is a constant to the compiler."""
    return {} if form.traced else {"trace": None}


def _lse_items(plan: SplitPlan) -> int:
    """Distance between the log-sum-exps of two rows where those of a row lie side by side, else 0.

    Measured up to 32 rows a program; with 64 the kernel has no register left for it.
    """
    return plan.items if plan.tile.kernel == "hopper" and plan.tile.block_r <= 32 else 0


def split_launch(plan: SplitPlan, form: CallForm) -> Launch:
    """Stage one of ``plan``."""
    r, tile = plan.request, plan.tile
    if tile.kernel == "hopper":
        from sglang.srt.layers.attention.verify.hopper import mla_split_kernel

        constants = {
            "HEADS": r.q_heads,
            "BLOCK_R": tile.block_r,
            "FP8": r.kv_dtype.itemsize == 1,
            "STAGES": tile.num_stages,
            "CHAIN": plan.early_split,
            "LSE_ITEMS": _lse_items(plan),
        } | _untraced(form)
        options: dict[str, Any] = {"num_warps": tile.num_warps}
        if tile.max_registers:
            options["maxnreg"] = tile.max_registers
        if plan.early_split:
            options["launch_pdl"] = True
        grid = (plan.items, plan.row_blocks)
        return Launch(mla_split_kernel, grid, constants | _schedule(plan, form), options)
    constants = {
        "Q_HEADS": r.q_heads,
        "GROUP": r.group,
        "DIM": r.v_dim,
        "BLOCK_D": triton.next_power_of_2(r.v_dim),
        "EXTRA": r.qk_dim - r.v_dim,
        "SHARED_KV": r.kind == "mla",
        "BLOCK_N": tile.block_n,
        "BLOCK_R": tile.block_r,
        "ROW_BLOCKS": plan.row_blocks,
        "MASK_LAYOUT": {"none": 0, "qlen": 1, "full": 2}[r.mask],
        "HAS_CAP": r.logit_cap > 0,
    }
    return Launch(
        split_kernel,
        (plan.items, plan.row_blocks * r.kv_heads),
        constants | _schedule(plan, form),
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def merge_launch(plan: SplitPlan, form: CallForm) -> Launch:
    """Stage two of ``plan``."""
    r, merge = plan.request, plan.merge
    kernel = merge_kernel
    device: dict[str, Any] = {}
    if r.capability != (0, 0):
        from sglang.srt.layers.attention.verify.merge_gpu import merge_gpu_kernel

        kernel = merge_gpu_kernel
        lanes = triton.next_power_of_2(merge.rounds * merge.block_s)
        device = {"LANES": lanes, "LSE_ITEMS": _lse_items(plan)} | _untraced(form)
    constants = device | {
        "Q_HEADS": r.q_heads,
        "DIM": r.v_dim,
        "BLOCK_D": merge.block_d,
        "BLOCK_S": merge.block_s,
        "ROUNDS": merge.rounds,
    }
    options: dict[str, Any] = {"num_warps": merge.num_warps}
    if plan.early_merge:
        options["launch_pdl"] = True
    grid = (r.batch * r.tokens * r.q_heads, triton.cdiv(r.v_dim, merge.block_d))
    return Launch(kernel, grid, constants | _schedule(plan, form), options)


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def check_operands(plan: SplitPlan, x: Operands) -> None:
    """Raise ValueError when shapes, dtypes or strides are not what ``plan`` was made for."""
    r = plan.request
    rows = r.batch * r.tokens
    _expect(
        tuple(x.q.shape) == (rows, r.q_heads, r.qk_dim),
        f"q is {tuple(x.q.shape)}, plan needs ({rows}, {r.q_heads}, {r.qk_dim}): "
        f"{r.batch} requests of {r.tokens} tokens",
    )
    _expect(
        tuple(x.out.shape) == (rows, r.q_heads, r.v_dim),
        f"out is {tuple(x.out.shape)}, plan needs ({rows}, {r.q_heads}, {r.v_dim})",
    )
    for name, pool, dim in (("k", x.k, r.qk_dim), ("v", x.v, r.v_dim)):
        _expect(
            pool.dim() == 3 and tuple(pool.shape[1:]) == (r.kv_heads, dim),
            f"{name} pool is {tuple(pool.shape)}, plan needs (slots, {r.kv_heads}, {dim})",
        )
        _expect(pool.dtype == r.kv_dtype, f"{name} pool is {pool.dtype}, plan was made for {r.kv_dtype}")
        _expect(pool.stride(2) == 1, f"{name} pool rows must be contiguous, stride is {pool.stride(2)}")
    _expect(x.q.dtype == r.q_dtype, f"q is {x.q.dtype}, plan was made for {r.q_dtype}")
    _expect(x.q.stride(2) == 1, f"q rows must be contiguous, stride is {x.q.stride(2)}")
    _expect(x.out.is_contiguous(), "out must be contiguous")
    if x.lse is not None:
        _expect(
            tuple(x.lse.shape) == (rows, r.q_heads)
            and x.lse.dtype == torch.float32
            and x.lse.is_contiguous(),
            f"lse is {tuple(x.lse.shape)} {x.lse.dtype}, needs contiguous float32 ({rows}, {r.q_heads})",
        )


def check_mask(plan: SplitPlan, context: KVContext) -> None:
    """Raise ValueError when the context's mask is not the one the plan was made for."""
    have = "none" if context.tree_mask is None else "qlen" if context.mask_indptr is None else "full"
    wanted = plan.request.mask
    _expect(have == wanted, f"context has mask layout {have!r}, plan was made for {wanted!r}")


def attend(
    plan: SplitPlan,
    workspace: VerifyWorkspace,
    x: Operands,
    context: KVContext,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    work: PassList | None = None,
) -> None:
    """Check, then launch split and merge on the current stream.

    ``work``: the work list of the forward pass that the call is part of, for kernels that read one.
    """
    r = plan.request
    check_operands(plan, x)
    context.check(r.batch, r.tokens)
    check_mask(plan, context)
    workspace.check(plan)
    _expect(
        (logit_cap > 0) == (r.logit_cap > 0),
        f"logit cap {logit_cap} but the plan was made for {r.logit_cap}",
    )
    if r.kv_dtype.itemsize > 1:
        k_scale = v_scale = 1.0
    if plan.tile.kernel == "plain":
        attend_plain(x.q, x.k, x.v, x.out, context, plan, sm_scale, k_scale, v_scale, logit_cap, x.lse)
        return
    if plan.tile.kernel in ("fused", "warpgroup"):
        stamps = x.trace if x.trace is not None else (None, None)
        call = FusedCall(
            plan, workspace, x.q, x.k, x.out, x.lse, context, sm_scale * k_scale, v_scale, stamps[0]
        )
        if plan.tile.kernel == "fused":
            attend_fused(call)
        else:
            attend_warpgroup(call, stamps[1], work)
        return

    table = context.req_to_token if context.req_to_token is not None else context.kv_indices
    assert table is not None
    unused = context.seq_lens
    requests = context.req_pool_indices if context.req_pool_indices is not None else unused
    indptr = context.kv_indptr if context.kv_indptr is not None else unused
    lse = x.lse if x.lse is not None else workspace.lse
    stride_table = context.req_to_token.stride(0) if context.req_to_token is not None else 0
    traced = [{"trace": t} for t in x.trace] if x.trace is not None else [{}, {}]
    form = CallForm(
        context.lens_include_new, context.req_to_token is not None, x.lse is not None, x.trace is not None
    )
    partial = workspace.partial_of(plan)
    split = split_launch(plan, form)
    common = (
        x.q,
        x.k,
        x.out,
        lse,
        partial,
        workspace.lse,
        context.seq_lens,
        requests,
        table,
        indptr,
    )
    strides = (stride_table, x.q.stride(0), x.q.stride(1), x.k.stride(0))
    if plan.tile.kernel == "hopper":
        split.run(*common, *strides, sm_scale * k_scale, v_scale, r.batch, plan.target, **traced[0])
    else:
        mask = context.tree_mask
        split.run(
            *common,
            x.v,
            unused if mask is None else mask.view(torch.uint8),
            unused if context.mask_indptr is None else context.mask_indptr,
            *strides,
            x.k.stride(1),
            x.v.stride(0),
            x.v.stride(1),
            sm_scale * k_scale,
            v_scale,
            logit_cap if logit_cap > 0 else 1.0,
            r.batch,
            plan.target,
        )
    merge_launch(plan, form).run(
        partial,
        workspace.lse,
        x.out,
        lse,
        context.seq_lens,
        requests,
        v_scale,
        r.batch,
        plan.target,
        **traced[1],
    )
