"""The MLA kernels for Hopper in two launches (``warpgroup.cu``), and a third that writes a forward pass' work list."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.fused import FRESH_LIST, FusedCall, arguments, checked, stream_of
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.work_list import PassList


def variant_of(call: FusedCall, listed: bool = False) -> WarpgroupVariant:
    """The compile-time variant that the plan of ``call`` was made for."""
    tile = call.plan.tile
    return WarpgroupVariant(
        tile.block_r // 8,
        call.plan.request.q_dtype == torch.float16,
        call.trace is not None,
        listed,
        tile.pace,
        tile.num_stages,
    )


def attend_warpgroup(call: FusedCall, merge_trace: torch.Tensor | None, work: PassList | None = None) -> None:
    """Launch both stages on the current stream; ``merge_trace`` takes the merge's time stamps.

    ``work`` keeps the work list of the forward pass that the call belongs to, which is written first where it has none that
    is good for this call. Without it blocks find their work themselves.

    Raises:
        ValueError: cache or output rows are not 16-byte aligned.
    """
    call = checked(call, fused_driver.WARPGROUP_PATH)
    plan = call.plan
    stream = stream_of(call)
    capture = fused_driver.capture_of(stream) if work is not None else None
    if capture is None:
        work = None
    kernels = fused_driver.load(variant_of(call, work is not None), call.q.device)
    partial, sums = call.workspace.bytes, call.workspace.lse
    split = arguments(call, partial, sums, call.trace)
    merge = split if merge_trace is None else arguments(call, partial, sums, merge_trace)
    if work is None:
        kernels.launch(split, merge, plan.items, plan.request.batch, stream)
        return
    found, fresh = work.take(plan, call.context, stream, capture)
    split.list = merge.list = found.data_ptr()
    try:
        if fresh:
            kernels.lay_out(split, plan.items, stream)
            split.flags |= FRESH_LIST
        kernels.launch(split, merge, plan.items, plan.request.batch, stream)
    except BaseException:
        # Nobody may read a list that was not written, or that no split has waited for.
        work.begin()
        raise
