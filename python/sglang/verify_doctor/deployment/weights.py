"""Bytes of weights on one rank: from the files where they are here, else counted from the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Kept whole on every rank; everything else is divided.
_WHOLE = re.compile(
    r"(norm|q_a_proj|kv_a_proj_with_mqa|mlp\.gate\.|e_score_correction_bias|rotary|d2t|t2d|(^|\.)fc\.|vision_tower|mm_projector)"
)


@dataclass(frozen=True)
class Weights:
    """``rank_bytes`` on each rank, ``source`` in words; None where neither files nor configuration tell."""

    rank_bytes: int | None
    source: str


def of(directory: Path | None, config: Any, ranks: int) -> Weights:
    """Weights of one model.

    Args:
        directory: the checkpoint, None where it is not on this disk.
        config: upstream's ``ModelConfig``.
        ranks: tensor-parallel ranks.
    """
    from sglang.srt.speculative.arguments import checkpoint
    from sglang.srt.speculative.arguments.faults import ArgumentFault

    if directory is not None:
        try:
            headers = checkpoint.read_headers("--model-path", directory)
        except ArgumentFault:
            headers = None
        if headers:
            first = _first_predicted(config)
            total = sum(
                _share(name, entry.end - entry.begin, ranks)
                for name, entry in headers.items()
                if first is None or _layer(name) >= first
            )
            return Weights(int(total), "files on this disk")
        size = checkpoint.weight_bytes(directory)
        if size and predicted_layers(config) is None:
            return Weights(size // ranks, "files on this disk, divided evenly")
    counted = count(_plain(config.hf_text_config), _plain(config.hf_config), ranks, predicted_layers(config))
    return Weights(counted, "counted from the configuration" if counted is not None else "not known")


def predicted_layers(config: Any) -> int | None:
    """Layers of a draft that is a part of its target's checkpoint (MTP); None for a model of its own.

    Upstream gives such a draft an architecture that ends in ``NextN`` and builds these layers alone.
    """
    names = getattr(config.hf_config, "architectures", None) or [""]
    if not str(names[0]).endswith("NextN"):
        return None
    return int(getattr(config, "num_nextn_predict_layers", None) or 1)


def _first_predicted(config: Any) -> int | None:
    """Index of the first such layer: they follow the target's own in the checkpoint."""
    return None if predicted_layers(config) is None else int(config.num_hidden_layers)


def _layer(name: str) -> int:
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _plain(config: Any) -> dict[str, Any]:
    return dict(config.to_dict()) if hasattr(config, "to_dict") else dict(config)


def _share(name: str, size: int, ranks: int) -> float:
    return size if _WHOLE.search(name) else size / ranks


def count(
    text: Mapping[str, Any], whole: Mapping[str, Any], ranks: int, predicted: int | None = None
) -> int | None:
    """Bytes on one rank of a DeepSeek-V3-like or Llama-like text model; None for another shape.

    ``predicted`` counts that many layers of the sparse kind alone, as an MTP draft has them, and its joining projection.

    16-bit embeddings and head; linear layers as ``quantization_config`` says (fp8 one byte, packed INT4 half a byte and
    a 16-bit scale a group, of what its ``ignore`` list leaves). A vision tower is not counted.
    """
    hidden, layers, vocabulary = (
        text.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    heads = text.get("num_attention_heads")
    if not all(isinstance(value, int) and value for value in (hidden, layers, vocabulary, heads)):
        return None
    assert hidden and layers and vocabulary and heads
    bits = _Widths.of(text.get("quantization_config") or whole.get("quantization_config") or {})
    divided, kept = 2.0 * vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2), 0.0
    draft = text.get("draft_vocab_size")
    if (
        draft
    ):  # Head of its own vocabulary, and an embedding that is loaded before the target's takes its place.
        divided = 2.0 * (vocabulary + draft) * hidden
        kept += 2.0 * 3 * hidden * int(text.get("target_hidden_size") or hidden)
    if predicted is not None:
        layers = predicted
        kept += 2.0 * 2 * hidden * hidden
    latent = text.get("kv_lora_rank")
    if latent:
        nope, rope, value = (
            int(text[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        query = int(text.get("q_lora_rank") or 0)
        kept += layers * bits.attention * hidden * (query + latent + rope)
        per_layer = (
            (query or hidden) * heads * (nope + rope)
            + latent * heads * (nope + value)
            + heads * value * hidden
        )
        # Absorbed attention keeps a 16-bit copy of the latent's up-projection.
        divided += layers * (bits.attention * per_layer + 2.0 * latent * heads * (nope + value))
    else:
        width = int(text.get("head_dim") or hidden // heads)
        shared = int(text.get("num_key_value_heads") or heads)
        source = 2 * hidden if draft else hidden
        per_layer = source * width * (heads + 2 * max(shared, ranks)) + heads * width * hidden
        divided += layers * bits.attention * per_layer
    inner = int(text.get("intermediate_size") or 4 * hidden)
    experts = int(text.get("n_routed_experts") or text.get("num_experts") or 0)
    dense = int(text.get("first_k_dense_replace") or 0) if experts else layers
    if predicted is not None and experts:
        dense = 0
    divided += dense * bits.dense * 3 * hidden * inner
    if experts:
        narrow = int(text.get("moe_intermediate_size") or inner)
        sparse = layers - dense
        divided += sparse * bits.experts * 3 * hidden * narrow * experts
        divided += sparse * bits.shared * 3 * hidden * narrow * int(text.get("n_shared_experts") or 0)
        kept += sparse * 2.0 * hidden * experts
    return int(divided / ranks + kept)


@dataclass(frozen=True)
class _Widths:
    """Bytes of one weight by kind of layer."""

    attention: float = 2.0
    dense: float = 2.0
    shared: float = 2.0
    experts: float = 2.0

    @classmethod
    def of(cls, quantization: Mapping[str, Any]) -> _Widths:
        method = str(quantization.get("quant_method") or "")
        if not method:
            return cls()
        if method == "fp8":
            return cls(1.0, 1.0, 1.0, 1.0)
        groups = quantization.get("config_groups") or {}
        first: Mapping[str, Any] = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
        weights = first.get("weights") or {}
        width = float(weights.get("num_bits") or quantization.get("bits") or 4) / 8
        width += 2.0 / float(weights.get("group_size") or quantization.get("group_size") or 128)
        ignored = " ".join(str(entry) for entry in quantization.get("ignore") or [])
        return cls(
            attention=2.0 if "attn" in ignored else width,
            dense=2.0 if "mlp" in ignored else width,
            shared=2.0 if "shared_experts" in ignored else width,
            experts=width,
        )
