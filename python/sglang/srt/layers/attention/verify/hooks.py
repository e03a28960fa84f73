"""Entry points of the topic ``verify-attention``: what the patched lines of upstream's Triton backend call.

Each takes the original function first. Upstream's method always runs; only the kernel attribute it calls is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.admission import BackendFacts, admit_backend, admit_one_launch
from sglang.srt.layers.attention.verify.binding import (
    ATTRIBUTE,
    Binding,
    HeadShape,
    Scratch,
    device_traits,
)
from sglang.srt.layers.attention.verify.calls import Refusal, locate, mode_of
from sglang.srt.layers.attention.verify.dispatch import decode_kernel, extend_kernel
from sglang.srt.layers.attention.verify.plan import DeviceTraits

Original = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


def _opaque(function: F) -> F:
    """Keep Dynamo out of ``function``, as upstream does with its attention kernels."""
    disabled: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def binding_of(backend: Any) -> Binding | None:
    """The binding that ``init_backend`` left on a Triton backend."""
    found: Binding | None = getattr(backend, ATTRIBUTE, None)
    return found


def _backend_refusal(backend: Any, model_runner: Any, traits: DeviceTraits | str) -> str | None:
    """What keeps every call of this backend on the stock path."""
    if isinstance(traits, str):
        return traits
    admitted = admit_backend(
        BackendFacts(
            context_parallel=backend.dcp_size > 1,
            deterministic=bool(backend.enable_deterministic),
            window_pool=bool(backend.use_sliding_window_kv_pool),
            window=backend.sliding_window_size,
            virtual_slots=backend._translate_kv_loc is not None,
            multi_layer_draft=bool(
                backend.is_draft_runner and model_runner.server_args.enable_multi_layer_eagle
            ),
        )
    )
    return None if admitted.ok else admitted.reason


def whole_device(traits: DeviceTraits, server_args: Any) -> DeviceTraits:
    """``traits`` without the one launch where some multiprocessors may be out of its reach, counted with the reason."""
    admitted = admit_one_launch(server_args)
    if traits.fused == "no" or admitted.ok:
        return traits
    fallbacks.record(fused_driver.PATH, admitted.reason)
    return replace(traits, fused="no")


def _head_shape(backend: Any, model_runner: Any) -> HeadShape | None:
    """The ordinary layer of this model, to size scratch before any layer has run; None if unknown."""
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    dtype, kv_dtype = getattr(config, "dtype", None), getattr(pool, "dtype", None)
    if dtype is None or kv_dtype is None:
        return None
    if backend.use_mla:
        latent = int(config.kv_lora_rank)
        rope = int(config.qk_rope_head_dim)
        return HeadShape("mla", backend.num_head, 1, latent + rope, latent, dtype, kv_dtype)
    dim = int(backend.v_head_dim)
    return HeadShape("gqa", backend.num_head, backend.num_kv_head, dim, dim, dtype, kv_dtype)


def init_backend(original: Original, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``TritonAttnBackend.__init__``: bind the backend and put our objects where its kernels are."""
    original(backend, model_runner, *args, **kwargs)
    traits = device_traits(backend.device)
    known = whole_device(traits, model_runner.server_args) if isinstance(traits, DeviceTraits) else None
    binding = Binding(
        traits=known,
        refusal=_backend_refusal(backend, model_runner, traits),
        topk=backend.topk or 1,
        max_context=int(backend.req_to_token.shape[1]),
        req_to_token=backend.req_to_token,
        scratch=Scratch(backend.device),
        shape=_head_shape(backend, model_runner) if known is not None else None,
        layers=int(getattr(model_runner.token_to_kv_pool, "layer_num", 0)),
    )
    setattr(backend, ATTRIBUTE, binding)
    backend.extend_attention_fwd = _opaque(extend_kernel(binding, backend.extend_attention_fwd))
    backend.decode_attention_fwd = _opaque(decode_kernel(binding, backend.decode_attention_fwd))


def init_multi_step(original: Original, multi_step: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``TritonMultiStepDraftBackend.__init__``: tell each backend which draft step it serves.

    The steps run one after the other in one graph, so they share one scratch.
    """
    original(multi_step, *args, **kwargs)
    shared: Scratch | None = None
    for step, backend in enumerate(multi_step.attn_backends):
        binding = binding_of(backend)
        if binding is None:
            continue
        binding.draft_step, binding.topk = step, multi_step.topk
        shared = binding.scratch = shared or binding.scratch


def init_cuda_graph_state(
    original: Original, backend: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
) -> None:
    """Around ``TritonAttnBackend.init_cuda_graph_state``: allocate scratch for every batch size at once.

    Doing it here, before the first capture, keeps its address fixed for all graphs of this backend.
    """
    original(backend, max_bs, max_num_tokens, *args, **kwargs)
    binding = binding_of(backend)
    if binding is not None:
        widths = {1, max(1, max_num_tokens // max(1, max_bs))}
        binding.scratch.reserve(binding.plans_for(range(1, max_bs + 1), sorted(widths)))


def init_metadata(original: Original, backend: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``init_forward_metadata``: what follows runs eagerly, so no capture is under way any more."""
    binding = binding_of(backend)
    if binding is not None:
        binding.capturing = None
        binding.work.begin()
    return original(backend, forward_batch, *args, **kwargs)


def init_metadata_out_graph(
    original: Original, backend: Any, forward_batch: Any, in_capture: bool = False
) -> Any:
    """Around ``init_forward_metadata_out_graph``: open or close the record of a capture."""
    binding = binding_of(backend)
    if binding is not None:
        binding.capturing = None
        binding.work.begin()
        mode = mode_of(forward_batch.forward_mode, forward_batch.spec_info)
        if in_capture and mode is not None:
            binding.begin_capture(mode, int(forward_batch.batch_size))
    return original(backend, forward_batch, in_capture=in_capture)


def _layer_refusal(layer: Any) -> str | None:
    """What the stock kernels are not told about a layer but go by, through the metadata they are handed."""
    if layer.is_cross_attention:
        return "cross attention"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "sliding window"
    return None


def _attend(
    original: Original,
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    binding = binding_of(backend)
    if binding is None:
        return original(backend, q, k, v, layer, forward_batch, *args, **kw)
    rows = int(q.shape[0])
    call = locate(forward_batch, binding.req_to_token, rows, topk=binding.topk, draft_step=binding.draft_step)
    if call is not None:
        reason = binding.refusal or _layer_refusal(layer)
        if reason is not None:
            call = Refusal(call.mode, reason)
    if call is None or isinstance(call, Refusal):
        if call is not None:
            binding.refuse(call)
        return original(backend, q, k, v, layer, forward_batch, *args, **kw)
    binding.current = call
    binding.work.enter(int(getattr(layer, "layer_id", -1)), forward_batch)
    try:
        result = original(backend, q, k, v, layer, forward_batch, *args, **kw)
        if binding.current is not None:
            # Upstream took a branch that calls neither kernel attribute.
            binding.refuse(Refusal(call.mode, "the stock method took another branch"))
        return result
    finally:
        binding.current = None


@_opaque
def forward_extend(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Around ``TritonAttnBackend.forward_extend``: name the call that the kernel attribute is about to get.

    The keys of the new tokens are in the pool by then: upstream's method writes them first, and a model that
    passes ``save_kv_cache=False`` has written them itself, as the decode kernel needs it to as well.
    """
    return _attend(original, *args, **kwargs)


@_opaque
def forward_decode(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Around ``TritonAttnBackend.forward_decode``."""
    return _attend(original, *args, **kwargs)
