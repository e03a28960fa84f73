"""The one-launch MLA kernel (``fused.cu``): which calls it takes, and its launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.fused_build import Variant
from sglang.srt.layers.attention.verify.fused_driver import Params, TracedParams
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace

LOG2_E = 1.4426950408889634

# Bits of Params.flags, as in fused_work.cuh.
LENS_WIDE, REQUESTS_WIDE, SLOTS_WIDE, INCLUDE_NEW, HAS_TABLE, HAS_LSE, FRESH_LIST = 1, 2, 4, 8, 16, 32, 64


@dataclass(frozen=True)
class FusedCall:
    """One call: tensors as in ``launch.Operands``, scales as ``launch.attend`` passes them.

    ``score_scale`` multiplies the scores (softmax scale times the cache's), ``value_scale`` the output. ``trace`` takes
    time stamps, int64 [items, ``stamps.WIDTH``].
    """

    plan: SplitPlan
    workspace: VerifyWorkspace
    q: torch.Tensor
    latent: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    context: KVContext
    score_scale: float
    value_scale: float
    trace: torch.Tensor | None = None


def variant_of(call: FusedCall) -> Variant:
    """The compile-time variant that the plan of ``call`` was made for."""
    plan = call.plan
    r = plan.request
    fp8 = r.kv_dtype.itemsize == 1
    half = r.q_dtype == torch.float16
    return Variant(plan.tile.block_r // 8, half, fp8, plan.tile.num_stages, call.trace is not None)


def _wide(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.int64


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(tensor: torch.Tensor, strides: int) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as bulk copies need."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(tensor.stride(i) * size % 16 == 0 for i in range(strides))


def parameters(call: FusedCall) -> Params:
    """Arguments of the one launch; every tensor must outlive it."""
    space = call.workspace
    width = call.plan.items + call.plan.request.tokens * call.plan.request.q_heads
    return arguments(call, space.packets, space.headers, call.trace, width)


def arguments(
    call: FusedCall, packets: torch.Tensor, headers: torch.Tensor, trace: torch.Tensor | None, width: int = 0
) -> Params:
    """Arguments of a kernel over a latent cache that leaves results in ``packets`` and log-sum-exps in ``headers``.

    ``width``: distance between two blocks' ``headers`` where the kernel does not know it. Every tensor must outlive the
    launch.
    """
    plan, context = call.plan, call.context
    r = plan.request
    table = context.req_to_token
    slots = table if table is not None else context.kv_indices
    flags = (
        LENS_WIDE * _wide(context.seq_lens)
        | REQUESTS_WIDE * _wide(context.req_pool_indices)
        | SLOTS_WIDE * _wide(slots)
        | INCLUDE_NEW * context.lens_include_new
        | HAS_TABLE * (table is not None)
        | HAS_LSE * (call.lse is not None)
    )
    common = (
        call.q.data_ptr(),
        call.latent.data_ptr(),
        call.out.data_ptr(),
        _address(call.lse),
        packets.data_ptr(),
        headers.data_ptr(),
        context.seq_lens.data_ptr(),
        _address(context.req_pool_indices),
        _address(slots),
        _address(context.kv_indptr),
        None,
        0 if table is None else table.stride(0),
        call.q.stride(0) * call.q.element_size(),
        call.q.stride(1) * call.q.element_size(),
        call.latent.stride(0) * call.latent.element_size(),
        call.score_scale * LOG2_E,
        call.value_scale,
        r.batch,
        plan.target,
        plan.splits.min_keys,
        r.tokens,
        r.q_heads,
        flags,
        width,
    )
    if trace is None:
        return Params(*common)
    return TracedParams(*common, trace.data_ptr())


def checked(call: FusedCall, path: str) -> FusedCall:
    """``call`` with queries that copies of 16 bytes can read; where they are copied for it, a fallback of ``path``.

    Raises ValueError when cache or output rows are not aligned.
    """
    if not _aligned(call.latent, 1) or call.out.data_ptr() % 16:
        raise ValueError("cache rows and the output must start at multiples of 16 bytes")
    if call.latent.stride(0) * call.latent.element_size() >= 2**31:
        raise ValueError("two cache rows must not lie 2 GiB or more apart")
    indptr = call.context.kv_indptr
    if indptr is not None and indptr.dtype != torch.int32:
        raise ValueError(f"kv_indptr is {indptr.dtype}, needs int32")
    if not _aligned(call.q, 2):
        fallbacks.record(path, "queries not aligned to 16 bytes are copied first")
        return replace(call, q=call.q.clone(memory_format=torch.contiguous_format))
    return call


def stream_of(call: FusedCall) -> int:
    """The stream to launch on."""
    return torch.cuda.current_stream(call.q.device).cuda_stream if call.q.is_cuda else 0


def attend_fused(call: FusedCall) -> None:
    """Launch on the current stream. Raises ValueError when cache or output rows are not 16-byte aligned."""
    call = checked(call, fused_driver.PATH)
    kernel = fused_driver.load(variant_of(call), call.q.device)
    kernel.launch(parameters(call), call.plan.items, stream_of(call))
