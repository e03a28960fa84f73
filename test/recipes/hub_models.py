"""What a hub would answer for the models that the recipes name: a ``config.json`` and the headers of a draft.

Numbers are those of public configurations; the recipe's comment says which of them could be read and which stand
in for a file that could not. Weights are holes behind honest headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import draft_tensors, int4, write

Config = dict[str, Any]

_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0} | {
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64} | {
    "v_head_dim": 128
}
_INT4 = int4("gate", "up", "gate_up", "down")
_BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

KIMI_K2: Config = _LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": _YARN | {"factor": 32.0},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": _BLOCK_FP8,
}
KIMI_K25: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "torch_dtype": "bfloat16",
    "text_config": KIMI_K2
    | {"max_position_embeddings": 262144, "rope_scaling": _YARN, "quantization_config": _INT4},
    "vision_config": {"hidden_size": 1152},
}
DEEPSEEK: Config = KIMI_K2 | {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": _YARN | {"factor": 40.0},
}
LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_70B: Config = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

_DRAFT: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# AQ-MedAI's two drafts differ in the positions they state.
MHA_DRAFT: Config = _DRAFT | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}
MLA_DRAFT: Config = (
    MHA_DRAFT
    | _LATENT
    | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "draft_vocab_size": 163840,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": _YARN,
    }
)
# The training configuration of TorchSpec (kimi_k25_eagle3_mla.json), whose authors publish the draft: other layer ids, and
# no positions of its own beyond what its yarn scaling gives.
MLA_DRAFT_TRAINING: Config = {
    key: value for key, value in MLA_DRAFT.items() if key != "max_position_embeddings"
} | {
    "rope_scaling": _YARN | {"beta_fast": 1.0},
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
}
# SpecForge's configurations for DeepSeek V3 and Llama 3.
DEEPSEEK_DRAFT: Config = _DRAFT | {
    "hidden_size": 7168,
    "intermediate_size": 40960,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "float16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True},
}
LLAMA_8B_DRAFT: Config = _DRAFT | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
# Narrower than its target (sglang#4716). The widths are inferred: with them the tensors take the 3.15 GB in two bytes that
# a public inventory gives for the checkpoint; at the target's width they would take 4.9 GB.
LLAMA_70B_DRAFT: Config = LLAMA_8B_DRAFT | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "target_hidden_size": 8192,
}

HUB: dict[str, Config] = {
    "moonshotai/Kimi-K2.5": KIMI_K25,
    "moonshotai/Kimi-K2-Instruct": KIMI_K2,
    "RedHatAI/Kimi-K2-Instruct-quantized.w4a16": KIMI_K2 | {"quantization_config": _INT4},
    "deepseek-ai/DeepSeek-R1": DEEPSEEK,
    "deepseek-ai/DeepSeek-V3": DEEPSEEK,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_70B,
    "AQ-MedAI/Kimi-K25-eagle3": MHA_DRAFT,
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": MHA_DRAFT | {"max_position_embeddings": 131072},
    "lightseekorg/kimi-k2.5-eagle3-mla": MLA_DRAFT,
    "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B": LLAMA_8B_DRAFT,
    "lmsys/sglang-EAGLE3-LLaMA3.3-Instruct-70B": LLAMA_70B_DRAFT,
}


@dataclass(frozen=True)
class Hub:
    """Checkpoints on disk below ``root``, made at first use."""

    root: Path

    def path(self, name: str, config: Config | None = None) -> str:
        """Directory of a model by its name on the hub; of another ``config``, for a variation of it."""
        found = HUB[name] if config is None else config
        place = self.root / name.replace("/", "--") / str(abs(hash(repr(found))))
        if not place.exists():
            draft = "draft_vocab_size" in found
            reduced = draft and found["draft_vocab_size"] < found["vocab_size"]
            # Entry i of a d2t map is what is added to i: all zeros is the identity.
            tensors = (
                draft_tensors(found, [0] * found["draft_vocab_size"] if reduced else None) if draft else {}
            )
            write(place, found, tensors or {"model.norm.weight": ("BF16", (32,), None)})
        return str(place)
