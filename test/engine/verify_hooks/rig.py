"""Upstream's real Triton attention backend on a CPU, under Triton's interpreter, with a small pool behind it.

Only the model runner is a stand-in: the backend, its metadata code and its kernels are upstream's own, so a test
that compares the hooked path with the stock path compares with what would really have run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

CONTEXT = 192
SLOTS = 1024
REQUESTS = 8
# Slot 0 is where padded rows point; the last slot holds NaN and stands behind every unused table entry.
POISON_SLOT = SLOTS - 1


@dataclass(frozen=True)
class Arch:
    """Head counts and sizes of the model behind the backend (sizes in elements)."""

    name: str
    mla: bool
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


MLA = Arch("mla", True, 4, 1, 576, 512)
GQA = Arch("gqa", False, 6, 2, 64, 64)
MHA = Arch("mha", False, 3, 3, 64, 64)


class Pool:
    """A KV pool of one layer with upstream's three access methods. MLA: one latent buffer, values its front."""

    def __init__(self, arch: Arch, dtype: torch.dtype, generator: torch.Generator, scale: float) -> None:
        self.arch, self.dtype = arch, dtype
        shape = (SLOTS, arch.kv_heads, arch.qk_dim)
        self.keys = (torch.randn(shape, generator=generator) * scale).to(dtype)
        self.values = torch.randn((SLOTS, arch.kv_heads, arch.v_dim), generator=generator).to(dtype)
        self.keys[POISON_SLOT] = float("nan")
        self.values[POISON_SLOT] = float("nan")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[..., : self.arch.v_dim] if self.arch.mla else self.values

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        slots = getattr(where, "loc", where)
        self.keys[slots] = k.view(-1, *self.keys.shape[1:]).to(self.dtype)
        if not self.arch.mla:
            self.values[slots] = v.view(-1, *self.values.shape[1:]).to(self.dtype)


def model_runner(arch: Arch, pool: Pool, server_args: Any, *, draft: bool = False, page_size: int = 1) -> Any:
    """The attributes of ``ModelRunner`` that the Triton backend reads."""
    from sglang.srt.configs.model_config import AttentionArch

    table = torch.full((REQUESTS + 1, CONTEXT), POISON_SLOT, dtype=torch.int32)
    table[0] = 0
    config = SimpleNamespace(
        attention_arch=AttentionArch.MLA if arch.mla else AttentionArch.MHA,
        get_max_num_attention_heads=lambda: arch.q_heads,
        get_num_kv_heads=lambda tp_size: arch.kv_heads,
        v_head_dim=arch.v_dim,
        swa_v_head_dim=arch.v_dim,
        kv_lora_rank=arch.v_dim,
        qk_rope_head_dim=arch.qk_dim - arch.v_dim,
        context_len=CONTEXT,
        is_encoder_decoder=False,
        dtype=pool.dtype,
        hf_config=SimpleNamespace(architectures=["Tiny"], get_text_config=lambda: None),
        linear_attn_registry_result=None,
    )
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=REQUESTS, req_to_token=table),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(),
        sliding_window_size=None,
        page_size=page_size,
        model_config=config,
        device="cpu",
        gpu_id=0,
        server_args=server_args,
        is_draft_worker=draft,
    )


def attention_layer(arch: Arch, **changes: Any) -> Any:
    """The attributes of ``RadixAttention`` that the Triton backend reads."""
    from sglang.srt.layers.radix_attention import AttentionType

    fields: dict[str, Any] = dict(
        layer_id=0,
        tp_q_head_num=arch.q_heads,
        tp_k_head_num=arch.kv_heads,
        tp_v_head_num=arch.kv_heads,
        qk_head_dim=arch.qk_dim,
        v_head_dim=arch.v_dim,
        scaling=arch.qk_dim**-0.5,
        logit_cap=0.0,
        logit_capping_method="tanh",
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
        xai_temperature_len=-1,
    )
    return SimpleNamespace(**(fields | changes))


@contextlib.contextmanager
def server(**arguments: Any) -> Iterator[Any]:
    """Publish server arguments and a one-rank topology for the time of the block; yields the arguments."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention import verify_mask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    fields = dict(
        speculative_algorithm="EAGLE3",
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
        disable_cuda_graph=True,
    )
    override = runtime_context.get_context().override_server_args(**(fields | arguments))
    published = override.install()
    # On a CPU upstream picks the small mask layout, which its Triton kernels do not read.
    choose = verify_mask.default_tree_mask_mode
    verify_mask.default_tree_mask_mode = lambda: TreeMaskMode.FULL_MASK
    topology = dict(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1, attn_tp_rank=0)
    try:
        with runtime_context.get_parallel().override(**topology):
            yield published
    finally:
        verify_mask.default_tree_mask_mode = choose
        override.restore()


def fill_table(table: torch.Tensor, lengths: list[int], generator: torch.Generator) -> None:
    """Give request i (row i + 1) ``lengths[i]`` random slots; what follows in its row stays poisoned."""
    slots = torch.randperm(SLOTS - 2, generator=generator) + 1
    table[1:] = POISON_SLOT
    used = 0
    for row, length in enumerate(lengths, start=1):
        table[row, :length] = slots[used : used + length].to(torch.int32)
        used += length


def verify_input(tokens: int, mask: torch.Tensor | None, topk: int = 1) -> Any:
    """Upstream's own verify input; only what attention reads is set."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    return EagleVerifyInput(
        draft_token=None,
        custom_mask=mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=tokens - 1,
        topk=topk,
        draft_token_num=tokens,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def chain_mask(prefixes: list[int], tokens: int) -> torch.Tensor:
    """Upstream's full-layout mask of a chain: per request ``tokens`` rows over prefix and tokens, flattened."""
    parts = []
    for prefix in prefixes:
        tail = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        parts.append(torch.cat([torch.ones(tokens, prefix, dtype=torch.bool), tail], dim=1).flatten())
    return torch.cat(parts)
