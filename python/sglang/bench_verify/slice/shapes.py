"""Shapes of known models, and the part of one that a tensor-parallel rank holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.bench_verify.errors import BenchError


class ShapeError(BenchError):
    """A model that cannot be cut as asked."""


@dataclass(frozen=True)
class Shape:
    """An MLA model with routed experts. Widths in elements.

    ``source`` says where the numbers come from.
    """

    name: str
    source: str
    hidden: int
    layers: int
    dense_layers: int
    heads: int
    query_rank: int
    latent: int
    rope: int
    nope: int
    value: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_width: int
    dense_width: int
    vocabulary: int
    groups: int = 1
    groups_per_token: int = 1
    routed_scale: float = 1.0
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None


def _yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


NAMED = {
    "kimi-k2.5": Shape(
        name="kimi-k2.5",
        source="config.json of moonshotai/Kimi-K2.5 (text part, same as Kimi-K2)",
        hidden=7168,
        layers=61,
        dense_layers=1,
        heads=64,
        query_rank=1536,
        latent=512,
        rope=64,
        nope=128,
        value=128,
        experts=384,
        experts_per_token=8,
        shared_experts=1,
        expert_width=2048,
        dense_width=18432,
        vocabulary=163840,
        routed_scale=2.827,
        rope_theta=50000.0,
        rope_scaling=_yarn(64.0, 1.0),
    ),
    "deepseek-v3": Shape(
        name="deepseek-v3",
        source="config.json of deepseek-ai/DeepSeek-V3",
        hidden=7168,
        layers=61,
        dense_layers=3,
        heads=128,
        query_rank=1536,
        latent=512,
        rope=64,
        nope=128,
        value=128,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        expert_width=2048,
        dense_width=18432,
        vocabulary=129280,
        groups=8,
        groups_per_token=4,
        routed_scale=2.5,
        rope_scaling=_yarn(40.0, 32.0),
    ),
}


def find(name: str) -> Shape:
    """A named shape, or the one that a ``config.json`` (file or folder) describes.

    Raises ShapeError naming what is missing.
    """
    if name in NAMED:
        return NAMED[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ShapeError(f"{name!r} is neither a known model ({', '.join(sorted(NAMED))}) nor a config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        return Shape(
            name=path.parent.name or "config",
            source=path.name,
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            dense_layers=config.get("first_k_dense_replace", 0),
            heads=config["num_attention_heads"],
            query_rank=config["q_lora_rank"],
            latent=config["kv_lora_rank"],
            rope=config["qk_rope_head_dim"],
            nope=config["qk_nope_head_dim"],
            value=config["v_head_dim"],
            experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            shared_experts=config.get("n_shared_experts") or 0,
            expert_width=config["moe_intermediate_size"],
            dense_width=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            groups=config.get("n_group") or 1,
            groups_per_token=config.get("topk_group") or 1,
            routed_scale=config.get("routed_scaling_factor", 1.0),
            rope_theta=config.get("rope_theta", 10000.0),
            rope_scaling=config.get("rope_scaling"),
        )
    except KeyError as error:
        raise ShapeError(
            f"{path.name}: no {error}; only MLA models with routed experts can be sliced"
        ) from error


def rank_slice(
    shape: Shape, tp: int = 8, layers: int = 12, experts: int | None = None, ranks: int = 1
) -> Shape:
    """The share of ``ranks`` neighbours among ``tp`` ranks, with ``layers`` layers.

    Args:
        ranks: GPUs that the slice is served on; each of them then holds one rank's share, and reductions are real.
        layers: layers kept; one dense layer stays where the model has any.
        experts: experts kept; None keeps all. Fewer save memory and shrink the expert union of a verify
            (64 experts: 21.1 for 3 tokens, 384 experts: 23.5), which the row reports.
    """
    for what, value in (
        ("heads", shape.heads),
        ("expert width", shape.expert_width),
        ("vocabulary", shape.vocabulary),
    ):
        if value % tp:
            raise ShapeError(f"{shape.name}: {what} {value} does not divide by {tp} ranks")
    kept = shape.experts if experts is None else experts
    if kept < shape.experts_per_token:
        raise ShapeError(f"{kept} experts are fewer than the {shape.experts_per_token} that a token needs")
    return dataclasses.replace(
        shape,
        name=f"{shape.name}-tp{tp}-rank" + (f"s{ranks}" if ranks > 1 else ""),
        heads=shape.heads // tp * ranks,
        expert_width=shape.expert_width // tp * ranks,
        dense_width=shape.dense_width // tp * ranks,
        vocabulary=shape.vocabulary // tp * ranks,
        layers=layers,
        dense_layers=min(shape.dense_layers, 1),
        experts=kept,
        # Group-limited routing needs full groups; a slice with fewer experts routes freely.
        groups=shape.groups if kept == shape.experts else 1,
        groups_per_token=shape.groups_per_token if kept == shape.experts else 1,
    )


def target_config(shape: Shape, dtype: str = "bfloat16", context: int = 262144) -> dict[str, Any]:
    """``config.json`` of a target of this shape."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "n_group": shape.groups,
        "topk_group": shape.groups_per_token,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": shape.routed_scale,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "max_position_embeddings": context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "vocab_size": shape.vocabulary,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
        "rope_scaling": None if shape.rope_scaling is None else dict(shape.rope_scaling),
    }


def draft_config(
    shape: Shape, dtype: str = "bfloat16", context: int = 262144, head: int = 128
) -> dict[str, Any]:
    """``config.json`` of a one-layer Llama EAGLE-3 draft for a target of this shape."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": head,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocabulary,
        # EAGLE-3 drafts of large models have a vocabulary of about 32k of 160k tokens: one fifth.
        "draft_vocab_size": max(16, shape.vocabulary // 5),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": context,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_models(shape: Shape, folder: str | Path, dtype: str = "bfloat16") -> tuple[Path, Path]:
    """Write both ``config.json`` files below ``folder``; returns the target's and the draft's folder."""
    written = []
    for name, config in (("target", target_config(shape, dtype)), ("draft", draft_config(shape, dtype))):
        path = Path(folder) / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        written.append(path)
    return written[0], written[1]
