"""The MLA kernels for Hopper in two launches (``warpgroup.cu``): their launch."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.fused import FusedCall, arguments, checked, stream_of
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant


def variant_of(call: FusedCall) -> WarpgroupVariant:
    """The compile-time variant that the plan of ``call`` was made for."""
    tile = call.plan.tile
    return WarpgroupVariant(
        tile.block_r // 8, call.plan.request.q_dtype == torch.float16, call.trace is not None
    )


def attend_warpgroup(call: FusedCall, merge_trace: torch.Tensor | None) -> None:
    """Launch both stages on the current stream; ``merge_trace`` takes the merge's time stamps.

    Raises:
        ValueError: cache or output rows are not 16-byte aligned.
    """
    call = checked(call, fused_driver.WARPGROUP_PATH)
    plan = call.plan
    kernels = fused_driver.load(variant_of(call), call.q.device)
    partial, sums = call.workspace.bytes, call.workspace.lse
    split = arguments(call, partial, sums, call.trace)
    merge = split if merge_trace is None else arguments(call, partial, sums, merge_trace)
    kernels.launch(split, merge, plan.items, plan.request.batch, stream_of(call))
