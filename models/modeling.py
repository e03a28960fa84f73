"""Plain-PyTorch target and draft of the demonstration models: what training, measuring and tests share.

Written for reading and for CPUs and single GPUs: the latent attention is expanded (no absorption), all
experts are computed and weighed. The serving stack computes the same functions in other ways, and that
is the point: these few lines are the reference it is compared with.

Shapes: B sequences, T new tokens, S cached plus new tokens, H hidden width, V vocabulary, E experts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Norm(nn.Module):
    """RMS norm with a learnt scale; statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.type_as(x)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 and mscale else 1.0


def rope_frequencies(dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Rotations per position, float32 [dim // 2]; YaRN (arXiv 2309.00071, NTK-by-parts) when `scaling` is set."""
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not scaling:
        return plain
    original = scaling["original_max_position_embeddings"]

    def turning(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turning(scaling["beta_fast"])), 0)
    high = min(math.ceil(turning(scaling["beta_slow"])), dim - 1)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / scaling["factor"] * stretched + plain * (1 - stretched)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding of x [B, heads, T, D] at positions [B, T].

    DeepSeek pairs neighbours (0,1), (2,3)...; Llama pairs the halves. Only the pairing must agree between
    training and serving, the order in which the rotated pairs are laid out cancels in q.k.
    """
    angle = positions[:, None, :, None].float() * frequencies
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
    else:
        a, b = (half.float() for half in x.chunk(2, -1))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@dataclass
class Cache:
    """Keys and values of one attention layer, [B, heads, capacity, D], filled up to a length the caller owns."""

    key: Tensor
    value: Tensor

    def write(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new entries at `start`; return everything up to their end."""
        end = start + key.shape[2]
        self.key[:, :, start:end] = key
        self.value[:, :, start:end] = value
        return self.key[:, :, :end], self.value[:, :, :end]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T of S positions; q [B, heads, T, D], k [B, kv, S, D], v [B, kv, S, Dv]."""
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, columns, width = q.shape[2], k.shape[2], v.shape[-1]
    if q.is_cuda and width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # the fused kernels want one head size
    if rows == columns or rows == 1:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, scale=scale)
    else:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[..., :width]


class Mlp(nn.Module):
    """Gated SiLU feed-forward block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Moe(nn.Module):
    """Sigmoid-scored experts chosen with a correction bias that carries no gradient, plus a shared expert.

    The bias is moved after every training step towards equal load (DeepSeek-V3, arXiv 2412.19437, 2.1.2), so
    no auxiliary loss is needed. Experts live in stacked matrices: one product computes all of them.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.experts, self.inner, self.chosen = (
            c["n_routed_experts"],
            c["moe_intermediate_size"],
            c["num_experts_per_tok"],
        )
        self.factor = c["routed_scaling_factor"]
        width = c["hidden_size"]
        self.gate = nn.Parameter(torch.empty(self.experts, width))
        self.gate_proj = nn.Parameter(torch.empty(self.experts * self.inner, width))
        self.up_proj = nn.Parameter(torch.empty(self.experts * self.inner, width))
        self.down_proj = nn.Parameter(torch.empty(width, self.experts * self.inner))
        self.shared_experts = Mlp(width, self.inner * c["n_shared_experts"])
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("load", torch.zeros(self.experts), persistent=False)

    def route(self, x: Tensor) -> Tensor:
        """Weight of every expert for every token, zero for those not chosen: [..., E] float32."""
        with torch.autocast(x.device.type, enabled=False):
            score = F.linear(x.float(), self.gate.float()).sigmoid()
        index = (score.detach() + self.bias).topk(self.chosen, -1).indices
        picked = score.gather(-1, index)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * self.factor
        weight = torch.zeros_like(score).scatter(-1, index, picked)
        if self.training:
            self.load.copy_((weight.detach() > 0).float().mean(dim=tuple(range(weight.dim() - 1))))
        return weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
        weighed = torch.unflatten(hidden, -1, (self.experts, self.inner)) * self.route(x).to(
            hidden.dtype
        ).unsqueeze(-1)
        out: Tensor = F.linear(weighed.flatten(-2), self.down_proj) + self.shared_experts(x)
        return out

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Move the choice bias of every expert by `step` against its last load."""
        self.bias.add_(step * torch.sign(self.load.mean() - self.load))


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries and keys/values through low-rank latents, one shared rope key."""

    frequencies: Tensor

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.heads, self.nope, self.rope, self.value = (
            c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"],
        )  # fmt: skip
        self.latent = c["kv_lora_rank"]
        self.q_a_proj = nn.Linear(width, c["q_lora_rank"], bias=False)
        self.q_a_layernorm = Norm(c["q_lora_rank"], eps)
        self.q_b_proj = nn.Linear(c["q_lora_rank"], self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = Norm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, width, bias=False)
        scaling = c["rope_scaling"]
        temperature = yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) if scaling else 1.0
        self.scale = (self.nope + self.rope) ** -0.5 * temperature**2
        self.register_buffer(
            "frequencies", rope_frequencies(self.rope, c["rope_theta"], scaling), persistent=False
        )

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None, start: int) -> Tensor:
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
        )
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.value], -1)
        q_rope = rotate(q_rope, positions, self.frequencies, interleaved=True)
        k_rope = rotate(k_rope.unsqueeze(1), positions, self.frequencies, interleaved=True)
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope.expand(-1, self.heads, -1, -1)], -1)
        if cache is not None:
            k, v = cache.write(start, k, v)
        out: Tensor = self.o_proj(attend(q, k, v, self.scale).transpose(1, 2).flatten(-2))
        return out


class Layer(nn.Module):
    """Pre-norm block: latent attention, then a dense or a mixture-of-experts feed-forward."""

    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(c)
        dense = index < c["first_k_dense_replace"]
        self.mlp = Mlp(c["hidden_size"], c["intermediate_size"]) if dense else Moe(c)
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.dropout = 0.0

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        out = self.self_attn(self.input_layernorm(x), positions, cache, start)
        x = x + F.dropout(out, self.dropout, self.training)
        out = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(out, self.dropout, self.training)


class Target(nn.Module):
    """DeepSeek-V3 style decoder. `taps` are the layers whose *input* the draft reads."""

    def __init__(self, config: dict[str, Any], taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config, self.taps = config, taps
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(
        self, tokens: Tensor, caches: list[Cache] | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, T] at positions start.. -> (logits [B, T, V], features [B, T, len(taps) * H])."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        x = self.embed_tokens(tokens)
        features = []
        for index, layer in enumerate(self.layers):
            if index in self.taps:
                features.append(x)
            x = layer(x, positions, caches[index] if caches else None, start)
        seen = torch.cat(features, -1) if features else x[..., :0]
        return self.lm_head(self.norm(x)), seen

    def caches(self, batch: int, capacity: int, dtype: torch.dtype) -> list[Cache]:
        """Empty key/value caches on the model's device."""
        c, device = self.config, self.lm_head.weight.device
        heads, qk = c["num_attention_heads"], c["qk_nope_head_dim"] + c["qk_rope_head_dim"]

        def empty(width: int) -> Tensor:
            return torch.zeros(batch, heads, capacity, width, dtype=dtype, device=device)

        return [Cache(empty(qk), empty(c["v_head_dim"])) for _ in self.layers]


@dataclass
class DraftKeys:
    """Keys and values of each unrolled step of the training-time test, [B, heads, T, D] each."""

    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)


class Draft(nn.Module):
    """EAGLE-3 draft: one Llama layer over [embedding of the next token | fused target features]."""

    frequencies: Tensor
    target_ids: Tensor

    def __init__(self, config: dict[str, Any], feature_width: int) -> None:
        super().__init__()
        self.config = config
        width, eps, size = config["hidden_size"], config["rms_norm_eps"], config["head_dim"]
        self.heads, self.kv_heads, self.size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            size,
        )
        self.fc = nn.Linear(feature_width, width, bias=False)
        self.input_layernorm = Norm(width, eps)
        self.hidden_norm = Norm(width, eps)
        self.q_proj = nn.Linear(2 * width, self.heads * size, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, width, bias=False)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = Mlp(width, config["intermediate_size"])
        self.norm = Norm(width, eps)
        self.lm_head = nn.Linear(width, config["draft_vocab_size"], bias=False)
        self.register_buffer(
            "frequencies", rope_frequencies(size, config["rope_theta"], None), persistent=False
        )
        self.register_buffer("target_ids", torch.arange(config["draft_vocab_size"]))

    def project(self, embedding: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k and v [B, heads, T, D] of the layer's input."""
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], -1)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(x, positions, self.frequencies, interleaved=False) for x in (q, k))
        return q, k, v

    def finish(self, attended: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(logits over the draft vocabulary, state handed to the next draft step)."""
        state = state + self.o_proj(attended.transpose(1, 2).flatten(-2))
        state = state + self.mlp(self.post_attention_layernorm(state))
        return self.lm_head(self.norm(state)), state

    def forward(self, embedding: Tensor, state: Tensor, cache: Cache, start: int) -> tuple[Tensor, Tensor]:
        """Serving step: embedding of the next tokens and state, both [B, T, H], at positions start.. ."""
        positions = torch.arange(start, start + state.shape[1], device=state.device)[None]
        q, k, v = self.project(embedding, state, positions)
        k, v = cache.write(start, k, v)
        return self.finish(attend(q, k, v, self.size**-0.5), state)

    def unroll(self, embedding: Tensor, state: Tensor, past: DraftKeys) -> tuple[Tensor, Tensor]:
        """One step of the training-time test over whole sequences [B, T, H].

        At step s the row of position j stands for a draft that last saw target features at j - s: it may look
        at first-step keys up to j - s and, for its own s guesses, at the step-r key of position j - s + r.
        """
        step, length = len(past.key), state.shape[1]
        positions = torch.arange(length, device=state.device)[None]
        q, k, v = self.project(embedding, state, positions)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        past.key.append(k)
        past.value.append(v)
        scale = self.size**-0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-step)
        scores = [(q @ past.key[0].transpose(-1, -2) * scale).float().masked_fill(~mask, float("-inf"))]
        values = [_shift(past.value[r], step - r) for r in range(1, step + 1)]
        for r in range(1, step + 1):
            scores.append((q * _shift(past.key[r], step - r)).sum(-1, keepdim=True).float() * scale)
        weight = torch.cat(scores, -1).softmax(-1).to(v.dtype)
        attended = weight[..., :length] @ past.value[0]
        for r, value in enumerate(values):
            attended = attended + weight[..., length + r : length + r + 1] * value
        return self.finish(attended, state)

    def cache(self, batch: int, capacity: int, dtype: torch.dtype) -> Cache:
        """Empty key/value cache on the model's device."""

        def empty() -> Tensor:
            return torch.zeros(
                batch, self.kv_heads, capacity, self.size, dtype=dtype, device=self.fc.weight.device
            )

        return Cache(empty(), empty())


def _shift(x: Tensor, by: int) -> Tensor:
    """Move entries of [B, heads, T, D] `by` positions later; what falls before the start is zero."""
    return F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]] if by else x


def initialise(model: nn.Module, layers: int) -> None:
    """Normal weights, output projections scaled down with depth (uses torch's global generator)."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std /= math.sqrt(2 * layers)
            if "embed_tokens" in name:
                std = 0.5
            nn.init.normal_(weight, std=std if "lm_head" not in name else 0.02)


def export_target(model: Target) -> dict[str, Tensor]:
    """Weights under the names of a DeepSeek-V3 checkpoint, bfloat16 (choice bias float32, as published ones)."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix) if prefix else model
        if isinstance(module, Moe):
            if leaf == "gate":
                out[f"model.{prefix}.gate.weight"] = value.bfloat16()
            elif leaf == "bias":
                out[f"model.{prefix}.gate.e_score_correction_bias"] = value.bfloat16().float()
            else:
                for expert, part in enumerate(
                    value.chunk(module.experts, dim=1 if leaf == "down_proj" else 0)
                ):
                    out[f"model.{prefix}.experts.{expert}.{leaf}.weight"] = part.bfloat16().contiguous()
        else:
            out[name if name.startswith("lm_head") else f"model.{name}"] = value.bfloat16().contiguous()
    return out


def import_target(folder: Path, taps: tuple[int, ...]) -> Target:
    """Float32 model from a checkpoint folder."""
    config = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    model = Target(config, taps)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix) if prefix else model
        if not isinstance(module, Moe):
            state[name] = stored[name if name.startswith("lm_head") else f"model.{name}"]
        elif leaf == "gate":
            state[name] = stored[f"model.{prefix}.gate.weight"]
        elif leaf == "bias":
            state[name] = stored[f"model.{prefix}.gate.e_score_correction_bias"]
        else:
            parts = [stored[f"model.{prefix}.experts.{e}.{leaf}.weight"] for e in range(module.experts)]
            state[name] = torch.cat(parts, dim=1 if leaf == "down_proj" else 0)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.eval()


_DRAFT_TOP = ("fc.", "norm.", "lm_head.")
_DRAFT_ATTENTION = ("q_proj.", "k_proj.", "v_proj.", "o_proj.")


def _draft_name(name: str) -> str:
    if name.startswith(_DRAFT_TOP):
        return name
    return f"midlayer.self_attn.{name}" if name.startswith(_DRAFT_ATTENTION) else f"midlayer.{name}"


def export_draft(model: Draft, vocabulary: int) -> dict[str, Tensor]:
    """Weights under EAGLE-3's names, bfloat16, with d2t (target id minus draft id) and t2d (membership)."""
    state = {n: v.detach().cpu() for n, v in model.state_dict().items()}
    ids = state.pop("target_ids")
    out = {_draft_name(n): v.bfloat16().contiguous() for n, v in state.items()}
    out["d2t"] = ids - torch.arange(len(ids))
    out["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).scatter(0, ids, True)
    return out


def import_draft(folder: Path) -> Draft:
    """Float32 draft from a checkpoint folder."""
    config = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    model = Draft(config, stored["fc.weight"].shape[1])
    ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
    state = {n: stored[_draft_name(n)].float() for n in model.state_dict() if n != "target_ids"}
    model.load_state_dict({**state, "target_ids": ids})
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
