"""Made-up tiny checkpoints: a description, and weights that are zeros behind honest headers."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments.weights import expected_shapes

Config = dict[str, Any]

_CODES = {"I64": "q", "I32": "i"}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4}

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

DEEPSEEK: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 61,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

# The wrapper that Kimi-K2.5 checkpoints come in: vision tower outside, language model inside.
KIMI: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "torch_dtype": "bfloat16",
    "text_config": DEEPSEEK | {"model_type": "kimi_k2"},
    "vision_config": {"hidden_size": 16},
}

DRAFT: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "draft_vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
}

MLA_DRAFT: Config = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 1000,
    "draft_vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}

Tensors = dict[str, tuple[str, tuple[int, ...], list[int] | None]]


def int4(*dense: str) -> Config:
    """A ``quantization_config`` as Kimi-K2's INT4 releases have it; ``dense`` are the projections of a dense MLP that stay bf16."""
    kept = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", f"re:.*mlp\\.({'|'.join(dense)})_proj.*"]
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": kept,
        "config_groups": {"group_0": group},
    }


def draft_tensors(config: Mapping[str, Any], table: list[int] | None = None) -> Tensors:
    """Tensors that fit the draft's configuration; ``table`` is its d2t map."""
    reduced = config.get("draft_vocab_size")
    tensors: Tensors = {}
    for ending, shape in expected_shapes(config, reduced).items():
        name = f"midlayer.{ending}" if ending.startswith("self_attn.") else ending
        tensors[name] = ("BF16", shape, None)
    hidden = config["hidden_size"]
    tensors["norm.weight"] = tensors["midlayer.hidden_norm.weight"] = ("BF16", (hidden,), None)
    tensors["midlayer.mlp.down_proj.weight"] = ("BF16", (hidden, config["intermediate_size"]), None)
    if table is not None:
        tensors["d2t"] = ("I64", (len(table),), table)
    return tensors


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """Write headers and data; float data are a hole of zeros in the file."""
    table: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, _) in tensors.items():
        length = _SIZES[dtype]
        for size in shape:
            length *= size
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    header = json.dumps(table).encode()
    start = 8 + len(header)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(start + offset)
        for name, (dtype, _, values) in tensors.items():
            if values is not None:
                stream.seek(start + table[name]["data_offsets"][0])
                stream.write(array(_CODES[dtype], values).tobytes())


def write(directory: Path, config: Config, tensors: Tensors | None = None) -> Path:
    """A checkpoint directory with ``config.json`` and, where given, ``model.safetensors``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors is not None:
        write_safetensors(directory / "model.safetensors", tensors)
    return directory
