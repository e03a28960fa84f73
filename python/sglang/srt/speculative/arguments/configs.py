"""Questions to a ``config.json`` given as a dictionary: text part, attention kind, context length, dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Order in which wrappers name the language model inside them.
TEXT_KEYS = ("thinker_config", "llm_config", "language_config", "text_config")
# The first of these that a configuration has is its length.
_OLDER_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
CONTEXT_KEYS = (*_OLDER_LENGTHS, "max_position_embeddings")
# Number of next-token heads that a checkpoint brings along, under the names in use.
BUILTIN_HEAD_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
DTYPES = {
    "float": "float32",
    "float32": "float32",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration (the configuration itself for a plain text model)."""
    for key in TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return text_config(inner)
    return config


def architecture(config: Mapping[str, Any]) -> str:
    """First architecture name, or an empty string."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def family(config: Mapping[str, Any]) -> str:
    """Architecture of the language model: for a wrapper the inner one where it is named."""
    inner = architecture(text_config(config))
    return inner or architecture(config)


def is_mla(config: Mapping[str, Any]) -> bool:
    """Whether attention goes through one compressed latent head (MLA) rather than per-head keys and values."""
    text = text_config(config)
    return bool(text.get("kv_lora_rank")) and "qk_rope_head_dim" in text


def attention_name(config: Mapping[str, Any]) -> str:
    """``MLA``, ``GQA`` or ``MHA``, for messages."""
    if is_mla(config):
        return "MLA"
    text = text_config(config)
    heads = text.get("num_attention_heads")
    return "MHA" if text.get("num_key_value_heads", heads) == heads else "GQA"


def builtin_heads(config: Mapping[str, Any]) -> int:
    """How many next-token heads the checkpoint brings along (0: none)."""
    for part in (text_config(config), config):
        for key in BUILTIN_HEAD_KEYS:
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions that a model serves by its own account, rope scaling included; None where it does not say."""
    text = text_config(config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor: float = 1.0
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type", scaling.get("type"))
        # These describe a length that max_position_embeddings already includes.
        if "original_max_position_embeddings" not in scaling and kind != "llama3":
            stated = scaling.get("factor") or 1.0
            factor = float(stated) if isinstance(stated, (int, float)) and abs(stated) < 1e6 else 1.0
    for key in CONTEXT_KEYS:
        value = text.get(key)
        if isinstance(value, int):
            return int(factor * value)
    return None


def named_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype as written in the configuration, or None."""
    for part in (text_config(config), config):
        value = part.get("dtype") or part.get("torch_dtype")
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return None


def loaded_dtype(config: Mapping[str, Any], flag: str) -> str | None:
    """The dtype weights are loaded as under ``--dtype flag``; None where the name is unknown.

    ``auto`` keeps half-width dtypes and narrows float32 (or nothing stated) to float16, except for Gemma
    models, which overflow it.
    """
    if flag.lower() != "auto":
        return DTYPES.get(flag.lower())
    stated = DTYPES.get(named_dtype(config) or "float32")
    if stated == "float32":
        model_type = str(text_config(config).get("model_type", ""))
        return "bfloat16" if model_type.startswith("gemma") else "float16"
    return stated


def quantization(config: Mapping[str, Any]) -> str | None:
    """Method named by ``quantization_config`` (``compressed-tensors`` for its older key), or None."""
    for part in (config, text_config(config)):
        value = part.get("quantization_config")
        if isinstance(value, Mapping) and value:
            return str(value.get("quant_method") or value.get("quant_algo") or "unnamed")
        if part.get("compression_config"):
            return "compressed-tensors"
    return None
