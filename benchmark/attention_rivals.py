"""The kernels that the fork is measured against: upstream's own, and flashinfer's MLA."""

from __future__ import annotations

import torch
import triton
from attention_cases import HEADS, LATENT, SM_SCALE, VALUE, Call, Setup
from sglang.srt.layers.attention.verify.plan import device_traits


def upstream_verify_call(setup: Setup) -> tuple[Call, str]:
    """The prefill kernel that upstream's Triton backend uses for verify: prefix from the pool, chain beside it."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    case = setup.case
    bs, t = case.batch, case.tokens
    qo = torch.arange(0, bs * t + 1, t, dtype=torch.int32, device=setup.device)
    kv = torch.arange(0, bs * case.context + 1, case.context, dtype=torch.int32, device=setup.device)
    indices = setup.table[:, : case.context].reshape(-1).to(torch.int64)
    new = setup.table[:, case.context :].reshape(-1).long()
    chain = setup.pools[0].view(torch.uint8)[new].view(setup.pools.dtype).to(torch.bfloat16).contiguous()
    value = chain[..., :VALUE].contiguous()

    def call(layer: int) -> None:
        pool = setup.pools[layer]
        extend_attention_fwd(
            setup.q, chain, value, setup.out, pool, pool[..., :VALUE], qo, kv, indices,
            None, True, None, t, 1.0, 1.0, sm_scale=SM_SCALE,
        )  # fmt: skip

    return call, "extend_attention_fwd"


def upstream_decode_call(setup: Setup) -> tuple[Call, str]:
    """Upstream's split decode kernel and its merge, with the split counts its backend would use."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    case = setup.case
    bs, device = case.batch, setup.device
    cores = device_traits().sm_count
    most = max(8, min(triton.next_power_of_2(cores), triton.next_power_of_2(-(-setup.length // 32))))
    kv = torch.arange(0, bs * setup.length + 1, setup.length, dtype=torch.int32, device=device)
    indices = setup.table.reshape(-1).to(torch.int64)
    logits = torch.empty(bs, HEADS, most, VALUE, dtype=torch.float32, device=device)
    lse = torch.empty(bs, HEADS, most, dtype=torch.float32, device=device)
    splits = torch.empty(bs, dtype=torch.int32, device=device)
    lens = torch.full((bs,), setup.length, dtype=torch.int64, device=device)
    get_num_kv_splits_triton[(1,)](splits, lens, bs, 1, HEADS, 1, most, cores, MAX_NUM_SEQ=256)

    def call(layer: int) -> None:
        pool = setup.pools[layer]
        decode_attention_fwd(
            setup.q, pool, pool[..., :VALUE], setup.out, kv, indices, logits, lse, splits, most,
            SM_SCALE, 1.0, 1.0, has_mla=True, use_pdl=True,
        )  # fmt: skip

    return call, f"decode_attention_fwd, at most {most} splits"


def flashinfer_call(setup: Setup) -> tuple[Call, str]:
    """flashinfer's paged MLA, planned once on the host outside the timing; bf16 only (it has no fp8 latent)."""
    import flashinfer

    case = setup.case
    bs, t, device = case.batch, case.tokens, setup.device
    space = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="auto")
    wrapper.plan(
        torch.arange(0, bs * t + 1, t, dtype=torch.int32, device=device),
        torch.arange(0, bs * setup.length + 1, setup.length, dtype=torch.int32, device=device),
        setup.table.reshape(-1).contiguous(),
        torch.full((bs,), setup.length, dtype=torch.int32, device=device),
        HEADS, VALUE, LATENT - VALUE, 1, t > 1, SM_SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    nope = setup.q[..., :VALUE].contiguous()
    rope = setup.q[..., VALUE:].contiguous()

    def call(layer: int) -> None:
        pool = setup.pools[layer]
        wrapper.run(nope, rope, pool[..., :VALUE], pool[..., VALUE:], out=setup.out)

    return call, f"flashinfer {flashinfer.__version__} BatchMLAPagedAttentionWrapper"
