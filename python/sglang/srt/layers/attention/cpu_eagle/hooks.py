"""What upstream's attention factories are sent to on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.fork import fallbacks
from sglang.srt.layers.attention.cpu_eagle.admission import refusal

__all__ = ["create_attention_backend", "create_draft_decode_backend", "create_draft_extend_backend"]

#: The name under which upstream knows this backend. Upstream asks for the names of backends without Triton when it
#: decides how slots are assigned, so a name of our own would be sent to Triton kernels.
NAME = "torch_native"


def _serves_absorbed_latents() -> None:
    """Tell DeepSeek models to absorb in every mode: the pool holds latents, and this backend reads the pool.

    Their default expands keys and values for a prefill without prefix, and these never reach the pool.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register(NAME, _dispatch_mla_subtype)


def create_attention_backend(original: Callable[[Any], Any], runner: Any) -> Any:
    """Around the factory of `torch_native`: return our backend where it can serve the model.

    Raises:
        NotImplementedError: it cannot, and the model runs speculatively.
    """
    reason = refusal(runner)
    if reason is None:
        from sglang.srt.layers.attention.cpu_eagle.backend import CpuEagleAttention

        if runner.use_mla_backend:
            _serves_absorbed_latents()
        return CpuEagleAttention(runner)
    if runner.server_args.speculative_algorithm is not None:
        raise NotImplementedError(
            f"--speculative-algorithm {runner.server_args.speculative_algorithm} with attention backend {NAME}: "
            f"{reason}. Serve this model without speculation or on a GPU"
        )
    fallbacks.record("cpu-eagle.attention", reason)
    return original(runner)


def _chosen(factory: Any, role: str) -> bool:
    """Return whether the draft's attention backend for `role` is the one this module serves."""
    args = factory.server_args
    name = factory.draft_attn_backend or getattr(args, f"{role}_attention_backend") or args.attention_backend
    return bool(name == NAME) and str(factory.draft_model_runner.device) == "cpu"


def create_draft_decode_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Around `DraftBackendFactory.create_decode_backend`: add the CPU's draft steps."""
    if not _chosen(factory, "decode") or factory.speculative_num_steps <= 1:
        return original(factory)
    from sglang.srt.layers.attention.cpu_eagle.backend import CpuEagleDraftSteps

    return CpuEagleDraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Around `DraftBackendFactory.create_draft_extend_backend`: add the CPU's draft extend."""
    role = "decode" if factory.server_args.speculative_attention_mode == "decode" else "prefill"
    if not _chosen(factory, role):
        return original(factory)
    reason = refusal(factory.draft_model_runner)
    if reason is not None:
        raise NotImplementedError(
            f"draft model with attention backend {NAME}: {reason}. Choose another draft model, or serve on a GPU"
        )
    from sglang.srt.layers.attention.cpu_eagle.backend import CpuEagleAttention

    return CpuEagleAttention(factory.draft_model_runner)
