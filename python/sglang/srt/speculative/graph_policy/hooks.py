"""What patched upstream functions call for the graph policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.graph_policy import capture, flags
from sglang.srt.speculative.graph_policy.facts import KINDS, explain, kind_of
from sglang.srt.speculative.graph_policy.policy import forbid_eager, mode_of
from sglang.srt.speculative.graph_policy.reasons import NOT_CAPTURED, Eager
from sglang.srt.speculative.graph_policy.reasons import OFF as SWITCHED_OFF
from sglang.srt.speculative.graph_policy.sizes import KindPlan

Original = Callable[..., Any]


def resolve(original: Original, server_args: Any) -> None:
    """Around ``ServerArgs.__post_init__``: check the policy once everything is resolved."""
    original(server_args)
    if str(server_args.model_path).lower() not in ("none", "dummy"):
        flags.check(server_args)


def may_replay(original: Original, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the target's ``can_run_graph``: under ``require`` a verify that cannot replay ends the server.

    Raises:
        VerifyGraphRequired: see there.
    """
    allowed = original(self, forward_batch, *args, **kwargs)
    if not allowed and kind_of(self) == "verify" and not forward_batch.forward_mode.is_idle():
        forbid_eager(self.model_runner.server_args, explain(self, forward_batch))
    return allowed


def capture_target(original: Original, *, model_runner: Any) -> Any:
    """Around upstream's capture of the target's graphs: decode, or verify with speculation.

    Raises:
        VerifyGraphRequired: the policy is ``require`` and no graph of verify was captured.
        CaptureOutOfMemory: memory ran out.
    """
    speculates = model_runner.spec_algorithm.is_speculative()
    if model_runner.is_draft_worker or model_runner.device == "cpu":
        return original(model_runner=model_runner)
    kind = "verify" if speculates else "decode"
    if speculates and mode_of(model_runner.server_args) == flags.OFF:
        capture.absent(kind, Eager(SWITCHED_OFF))
        return _captures_nothing(original, model_runner)
    config = model_runner.server_args.cuda_graph_config.decode
    if config.backend == "disabled" or not config.bs:
        for name in KINDS:
            capture.absent(
                name, Eager(NOT_CAPTURED, f"{flags.BACKEND_FLAG}=disabled or --disable-cuda-graph")
            )
        return original(model_runner=model_runner)
    plan = _plan(model_runner, kind, model_runner.decode_num_tokens_per_req())
    done = capture.watched(
        plan,
        capture.model_facts(model_runner, kind),
        lambda: _free(model_runner),
        lambda: original(model_runner=model_runner),
        speak=_speaks(model_runner),
    )
    if speculates and done.runner is None:
        forbid_eager(model_runner.server_args, capture.why_absent(kind))
    return done


def capture_draft(original: Original, self: Any, eagle_worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the constructors of the draft's two graph runners, which capture."""
    runner = getattr(eagle_worker, "draft_runner", None) or eagle_worker.model_runner
    if runner.device == "cpu":
        return original(self, eagle_worker, *args, **kwargs)
    kind = kind_of(self)
    spec = runner.server_args
    extends = kind == "draft_extend"
    width = spec.speculative_num_draft_tokens if extends else spec.speculative_eagle_topk
    backend = getattr(eagle_worker, "draft_extend_attn_backend" if extends else "draft_attn_backend", None)
    inner = getattr(backend, "attn_backends", None)
    return capture.watched(
        _plan(runner, kind, int(width or 1)),
        capture.model_facts(runner, kind, inner[0] if inner else backend),
        lambda: _free(runner),
        lambda: original(self, eagle_worker, *args, **kwargs),
        speak=_speaks(runner),
    )


def internal_state(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the scheduler's internal state: adds ``verify_graph``."""
    output = original(self, *args, **kwargs)
    output.internal_state["verify_graph"] = {
        "policy": mode_of(self.server_args),
        "captured": capture.state(),
    }
    return output


def _captures_nothing(original: Original, model_runner: Any) -> Any:
    """Upstream's own answer where it captures nothing, which it gives for models that do not generate."""
    generation = model_runner.is_generation
    model_runner.is_generation = False
    try:
        return original(model_runner=model_runner)
    finally:
        model_runner.is_generation = generation


def _plan(model_runner: Any, kind: str, width: int) -> KindPlan:
    from sglang.srt.model_executor.runner import get_batch_sizes_to_capture

    sizes, _ = get_batch_sizes_to_capture(model_runner, width if kind in ("verify", "decode") else 1)
    return KindPlan(kind, width, tuple(sizes))


def _free(model_runner: Any) -> int:
    from sglang.srt.utils import get_available_gpu_memory

    return int(get_available_gpu_memory(model_runner.device, model_runner.gpu_id) * (1 << 30))


def _speaks(model_runner: Any) -> bool:
    return bool(model_runner.ps.tp_rank == 0)
