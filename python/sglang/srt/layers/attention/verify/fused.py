"""The one-launch MLA kernel (``fused.cu``): which calls it takes, and its launch."""

from __future__ import annotations

import torch
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.fused_build import Variant
from sglang.srt.layers.attention.verify.fused_driver import Params
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace

LOG2_E = 1.4426950408889634

# Bits of Params.flags, as in fused.cu.
LENS_WIDE, REQUESTS_WIDE, SLOTS_WIDE, INCLUDE_NEW, HAS_TABLE, HAS_LSE = 1, 2, 4, 8, 16, 32


def variant_of(plan: SplitPlan) -> Variant:
    """The compile-time variant that ``plan`` was made for."""
    r = plan.request
    fp8 = r.kv_dtype.itemsize == 1
    return Variant(plan.tile.block_r // 8, r.q_dtype == torch.float16, fp8, plan.tile.num_stages)


def _wide(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.int64


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(tensor: torch.Tensor, strides: int) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as bulk copies need."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(tensor.stride(i) * size % 16 == 0 for i in range(strides))


def parameters(
    plan: SplitPlan,
    workspace: VerifyWorkspace,
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    context: KVContext,
    score_scale: float,
    value_scale: float,
) -> Params:
    """Arguments of one launch; every tensor must outlive it. Scales as ``launch.attend`` passes them."""
    r = plan.request
    table = context.req_to_token
    slots = table if table is not None else context.kv_indices
    flags = (
        LENS_WIDE * _wide(context.seq_lens)
        | REQUESTS_WIDE * _wide(context.req_pool_indices)
        | SLOTS_WIDE * _wide(slots)
        | INCLUDE_NEW * context.lens_include_new
        | HAS_TABLE * (table is not None)
        | HAS_LSE * (lse is not None)
    )
    return Params(
        q.data_ptr(),
        latent.data_ptr(),
        out.data_ptr(),
        _address(lse),
        workspace.packets.data_ptr(),
        workspace.headers.data_ptr(),
        context.seq_lens.data_ptr(),
        _address(context.req_pool_indices),
        _address(slots),
        _address(context.kv_indptr),
        0 if table is None else table.stride(0),
        q.stride(0) * q.element_size(),
        q.stride(1) * q.element_size(),
        latent.stride(0) * latent.element_size(),
        score_scale * LOG2_E,
        value_scale,
        r.batch,
        plan.target,
        plan.splits.min_keys,
        r.tokens,
        r.q_heads,
        flags,
        plan.items + r.tokens * r.q_heads,
    )


def attend_fused(
    plan: SplitPlan,
    workspace: VerifyWorkspace,
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    context: KVContext,
    score_scale: float,
    value_scale: float,
) -> None:
    """Launch on the current stream. Raises ValueError when cache or output rows are not 16-byte aligned."""
    if not _aligned(latent, 1) or out.data_ptr() % 16:
        raise ValueError("cache rows and the output must start at multiples of 16 bytes")
    if context.kv_indptr is not None and context.kv_indptr.dtype != torch.int32:
        raise ValueError(f"kv_indptr is {context.kv_indptr.dtype}, needs int32")
    if not _aligned(q, 2):
        fallbacks.record(fused_driver.PATH, "queries not aligned to 16 bytes are copied first")
        q = q.clone(memory_format=torch.contiguous_format)
    kernel = fused_driver.load(variant_of(plan), q.device)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    params = parameters(plan, workspace, q, latent, out, lse, context, score_scale, value_scale)
    kernel.launch(params, plan.items, stream)
