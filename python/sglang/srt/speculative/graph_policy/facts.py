"""The facts of a batch as an upstream graph runner sees them."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.graph_policy.reasons import UNKNOWN, Eager, Facts, Ragged, why_eager

KINDS = ("decode", "verify", "draft", "draft_extend")


def kind_of(runner: Any) -> str:
    """The pass that a graph runner serves."""
    name = type(runner).__name__
    if "DraftExtend" in name:
        return "draft_extend"
    if "Draft" in name:
        return "draft"
    mode = getattr(runner, "capture_forward_mode", None)
    return "verify" if mode is not None and mode.is_target_verify() else "decode"


def facts_of(runner: Any, batch: Any) -> Facts:
    """Read a runner and a ``ForwardBatch``; only what this kind of runner asks is filled in."""
    size = int(getattr(batch, "batch_size", 0))
    spec = getattr(batch, "spec_info", None)
    # The draft's runners ask for width, size and agreement of the ranks only.
    target = kind_of(runner) in ("decode", "verify")
    of_ranks = getattr(batch, "original_global_num_tokens_cpu", None)
    return Facts(
        batch=size,
        sizes=tuple(sorted(getattr(runner, "capture_bs", None) or (runner.max_bs,))),
        captured_width=int(getattr(runner, "captured_req_width", 1)),
        padding=not getattr(runner, "disable_padding", False),
        width=int(getattr(spec, "num_tokens_per_req", 0) or 0),
        of_ranks=max(of_ranks) if getattr(runner, "require_mlp_tp_gather", False) and of_ranks else None,
        own_embeddings=target and getattr(batch, "replace_embeds", None) is not None,
        ragged=_ragged(runner, batch) if target and getattr(runner, "ragged_verify_mode", False) else None,
        hidden_fits=_hidden_fits(runner, batch),
        ranks_ready=bool(batch.can_run_dp_cuda_graph) if getattr(runner, "require_mlp_sync", False) else None,
        encoder=_encoder(runner, batch) if target else None,
        two_batch=bool(batch.can_run_tbo)
        if target and getattr(runner, "enable_two_batch_overlap", False)
        else None,
        tokens=int(batch.input_ids.numel()) if target and _ngram(runner) else None,
    )


def explain(runner: Any, batch: Any) -> Eager:
    """Why ``runner`` refused ``batch``. A refusal that the facts do not explain is named as such."""
    try:
        found = why_eager(facts_of(runner, batch))
    except Exception as error:
        return Eager(UNKNOWN, f"reading the batch failed: {type(error).__name__}: {error}")
    return found or Eager(UNKNOWN, f"batch {getattr(batch, 'batch_size', '?')}")


def _ragged(runner: Any, batch: Any) -> Ragged | None:
    from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

    layout = resolve_ragged_verify_layout(batch)
    if layout is None:
        return Ragged(layout=False) if batch.forward_mode.is_target_verify() else None
    tokens = int(layout.graph_num_tokens)
    return Ragged(
        backend=bool(runner.attn_backend.supports_ragged_verify_graph),
        tokens=tokens,
        largest=int(runner.capture_num_tokens[-1]),
        slots=int(runner._ragged_capture_slots(tokens)),
    )


def _hidden_fits(runner: Any, batch: Any) -> bool:
    captured, asked = (
        getattr(runner, "capture_hidden_mode", None),
        getattr(batch, "capture_hidden_mode", None),
    )
    return bool(captured is None or asked is None or asked <= captured)


def _encoder(runner: Any, batch: Any) -> bool | None:
    if not getattr(runner, "is_encoder_decoder", False):
        return None
    return bool((batch.encoder_lens > 0).all())


def _ngram(runner: Any) -> bool:
    algorithm = getattr(getattr(runner, "model_runner", None), "spec_algorithm", None)
    return bool(algorithm is not None and algorithm.is_ngram())
