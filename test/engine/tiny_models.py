"""Random-weight models small enough for two cores, in the shapes that the CPU path has to serve.

`write_kimi_pair` makes a DeepseekV3 target (absorbed MLA with kv_lora 512 + rope 64, sigmoid routing with
correction bias, a shared expert, YaRN) and `write_llama_pair` a grouped-query Llama; each comes with a one-layer
Llama EAGLE-3 draft and a byte-level tokenizer. A random draft agrees with its target by chance only: see
`forced_acceptance` for tests of the accept path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

VOCAB = 320
HIDDEN = 128
CONTEXT = 2048
BOS, EOS = 256, 257


@dataclass(frozen=True)
class ModelPair:
    """Folders of a target and its draft."""

    target: Path
    draft: Path


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the 256 bytes plus begin and end marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "chat_template": "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class _Weights:
    """Collects named random tensors from one seeded generator."""

    def __init__(self, seed: int, std: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.std = std
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, std: float | None = None) -> None:
        noise = torch.randn(rows, columns, generator=self.generator)
        self.tensors[name] = noise * (self.std if std is None else std)

    def ones(self, name: str, size: int) -> None:
        self.tensors[name] = 1 + 0.1 * torch.randn(size, generator=self.generator)

    def vector(self, name: str, size: int, std: float) -> None:
        self.tensors[name] = std * torch.randn(size, generator=self.generator)

    def mlp(self, prefix: str, inner: int) -> None:
        self.matrix(f"{prefix}.gate_proj.weight", inner, HIDDEN)
        self.matrix(f"{prefix}.up_proj.weight", inner, HIDDEN)
        self.matrix(f"{prefix}.down_proj.weight", HIDDEN, inner)


def _save(folder: Path, config: dict[str, Any], weights: _Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights.tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(folder)


def _write_draft(folder: Path, seed: int, std: float, draft_vocab: int, aux_layers: tuple[int, ...]) -> None:
    heads, kv_heads, width = 4, 2, 32
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": HIDDEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        },
    }
    weights = _Weights(seed, std)
    weights.matrix("fc.weight", HIDDEN, len(aux_layers) * HIDDEN)
    layer = "midlayer"
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weights.matrix(f"{layer}.self_attn.{name}_proj.weight", rows * width, 2 * HIDDEN)
    weights.matrix(f"{layer}.self_attn.o_proj.weight", HIDDEN, heads * width)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights.ones(f"{layer}.{name}.weight", HIDDEN)
    weights.mlp(f"{layer}.mlp", 256)
    weights.ones("norm.weight", HIDDEN)
    weights.matrix("lm_head.weight", draft_vocab, HIDDEN)
    if draft_vocab != VOCAB:
        # Draft token i stands for target token i + d2t[i]; every target token below the draft's size is kept.
        weights.tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
        weights.tensors["t2d"] = torch.arange(VOCAB) < draft_vocab
    _save(folder, config, weights)


def write_kimi_pair(
    folder: Path, *, seed: int = 0, layers: int = 3, std: float = 0.08, draft_vocab: int = VOCAB
) -> ModelPair:
    """Write a DeepseekV3 target of Kimi's shape, and its draft, into `folder`.

    Args:
        std: standard deviation of the matrices; below about 0.05 greedy text repeats one token, which would
            make equality a weak test.
        draft_vocab: size of the draft's own vocabulary; below `VOCAB` the pair has token maps.
    """
    heads, lora, rope, nope, value, query_lora, experts, inner = 8, 512, 64, 32, 32, 64, 8, 64
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": lora,
        "q_lora_rank": query_lora,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": CONTEXT // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    weights = _Weights(seed, std)
    weights.matrix("model.embed_tokens.weight", VOCAB, HIDDEN, 1.0)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    weights.ones("model.norm.weight", HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        weights.matrix(f"{attention}.q_a_proj.weight", query_lora, HIDDEN)
        weights.ones(f"{attention}.q_a_layernorm.weight", query_lora)
        weights.matrix(f"{attention}.q_b_proj.weight", heads * (nope + rope), query_lora)
        weights.matrix(f"{attention}.kv_a_proj_with_mqa.weight", lora + rope, HIDDEN)
        weights.ones(f"{attention}.kv_a_layernorm.weight", lora)
        weights.matrix(f"{attention}.kv_b_proj.weight", heads * (nope + value), lora)
        weights.matrix(f"{attention}.o_proj.weight", HIDDEN, heads * value)
        if i == 0:
            weights.mlp(f"{layer}.mlp", 256)
            continue
        weights.matrix(f"{layer}.mlp.gate.weight", experts, HIDDEN)
        weights.vector(f"{layer}.mlp.gate.e_score_correction_bias", experts, 0.05)
        for expert in range(experts):
            weights.mlp(f"{layer}.mlp.experts.{expert}", inner)
        weights.mlp(f"{layer}.mlp.shared_experts", inner)
    _save(folder / "target", config, weights)
    _write_draft(folder / "draft", seed + 1, std, draft_vocab, (0, 1, layers - 1))
    return ModelPair(folder / "target", folder / "draft")


def write_llama_pair(
    folder: Path, *, seed: int = 0, layers: int = 4, std: float = 0.08, draft_vocab: int = VOCAB
) -> ModelPair:
    """Write a grouped-query Llama target and its draft into `folder`; arguments as in `write_kimi_pair`."""
    heads, kv_heads, width = 4, 2, 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    weights = _Weights(seed, std)
    weights.matrix("model.embed_tokens.weight", VOCAB, HIDDEN, 1.0)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    weights.ones("model.norm.weight", HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights.matrix(f"{layer}.self_attn.{name}_proj.weight", rows * width, HIDDEN)
        weights.matrix(f"{layer}.self_attn.o_proj.weight", HIDDEN, heads * width)
        weights.mlp(f"{layer}.mlp", 256)
    _save(folder / "target", config, weights)
    _write_draft(folder / "draft", seed + 1, std, draft_vocab, (0, 1, layers - 2))
    return ModelPair(folder / "target", folder / "draft")
