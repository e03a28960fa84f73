"""Whether this backend can serve a model, and if not, why."""

from __future__ import annotations

from typing import Any

__all__ = ["layer_refusal", "refusal"]


def refusal(runner: Any) -> str | None:
    """Return why this backend cannot serve `runner` (a model runner), or None if it can.

    A refused model without speculation goes to upstream's own backend; with speculation it stops the start,
    since upstream has nothing there to fall back to.
    """
    config = runner.model_config
    if str(runner.device) != "cpu":
        return f"device {runner.device} is not the CPU"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model keeps encoder tokens in front of the decoder's in the slot table"
    pool = type(runner.token_to_kv_pool).__name__
    if pool not in ("MHATokenToKVPool", "MLATokenToKVPool"):
        return f"KV pool {pool} does not keep one row a token in every layer"
    return None


def layer_refusal(layer: Any, extra: dict[str, Any]) -> str | None:
    """Return why this backend cannot run one attention layer with keyword arguments `extra`, or None."""
    if layer.is_cross_attention:
        return "cross attention"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        return f"length-dependent temperature ({layer.xai_temperature_len})"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"logit capping method {layer.logit_capping_method!r} (only 'tanh')"
    given = sorted(name for name, value in extra.items() if value is not None)
    return f"attention argument {given[0]!r}" if given else None
