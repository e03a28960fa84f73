"""Batched attention over a slot pool, in float32 whatever the pool holds."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.cpu_eagle.plan import AttentionPlan
from torch import Tensor

__all__ = ["attend"]

# Scores of one block of queries: 32 Mi floats, 128 MiB. A long prefill goes block by block.
MAX_SCORES = 32 * 1024 * 1024
# Batch requests of unequal length only while padding adds less than this share of the work.
MAX_PADDING = 0.5


def _block(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, logit_cap: float
) -> Tensor:
    """Attend one block.

    query [bs, queries, heads, D] and mask [bs, queries, tokens] meet keys [bs, tokens, KV heads, D] and values
    [bs, tokens, KV heads, Dv]; all float32. Returns [bs, queries, heads, Dv].
    """
    bs, queries, heads, width = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    # The queries and heads that share a KV head form the rows of one matrix product.
    rows = query.view(bs, queries, kv_heads, group, width).permute(0, 2, 1, 3, 4)
    rows = rows.reshape(bs, kv_heads, queries * group, width) * scale
    score = torch.matmul(rows, keys.permute(0, 2, 3, 1))
    if logit_cap > 0:
        score = torch.tanh_(score.div_(logit_cap)).mul_(logit_cap)
    if mask is not None:
        blind = ~mask
        score.view(bs, kv_heads, queries, group, -1).masked_fill_(blind[:, None, :, None, :], float("-inf"))
    weight = torch.softmax(score, dim=-1)
    out = torch.matmul(weight, values.permute(0, 2, 1, 3))
    out = out.view(bs, kv_heads, queries, group, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(bs, queries, heads, -1)


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """Return pool rows as float32; index_select is the fastest row gather PyTorch has on a CPU."""
    flat = torch.index_select(pool, 0, slots.reshape(-1)).float()
    return flat.view(*slots.shape, *pool.shape[1:])


def attend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    logit_cap: float = 0.0,
    window: int = -1,
    causal: bool = True,
) -> Tensor:
    """Attend as `plan` says.

    Args:
        query: [tokens, heads, D], tokens = sum of the plan's query lengths.
        key_pool: [slots, KV heads, D], any float dtype.
        value_pool: [slots, KV heads, Dv]. Where it is a view of the first columns of `key_pool` (absorbed
            MLA), each row is read once.
        scale, logit_cap, window: as in `reference.reference_attention`.
        causal: False lets every query see every token (encoders).

    Returns:
        [tokens, heads, Dv] in the query's dtype; sums and products are float32.

    Raises:
        ValueError: the query's rows do not match the plan.
    """
    bs = len(plan.kv_lens)
    if query.shape[0] != sum(plan.query_lens):
        raise ValueError(
            f"{query.shape[0]} query rows, the plan has {sum(plan.query_lens)} ({plan.query_lens}); "
            "attention metadata is of another batch"
        )
    heads, width = query.shape[1:]
    value_dim = value_pool.shape[-1]
    shared = value_pool.data_ptr() == key_pool.data_ptr() and value_dim <= key_pool.shape[-1]
    output = query.new_empty(query.shape[0], heads, value_dim)
    if query.shape[0] == 0:
        return output

    longest = plan.slots.shape[1]
    padded = bs * longest
    if (
        plan.uniform
        and causal
        and padded - sum(plan.kv_lens) <= MAX_PADDING * padded
        and padded * plan.query_lens[0] * heads <= MAX_SCORES
    ):
        keys = _gather(key_pool, plan.slots)
        values = keys[..., :value_dim] if shared else _gather(value_pool, plan.slots)
        own = query.float().view(bs, plan.query_lens[0], heads, width)
        result = _block(own, keys, values, plan.batched_mask(window), scale, logit_cap)
        output.view(result.shape).copy_(result)
        return output

    start = 0
    for request in range(bs):
        tokens, queries = plan.kv_lens[request], plan.query_lens[request]
        if queries == 0:
            continue
        slots = plan.slots[request : request + 1, :tokens]
        keys = _gather(key_pool, slots)
        values = keys[..., :value_dim] if shared else _gather(value_pool, slots)
        mask = plan.mask(request, window).unsqueeze(0) if causal else None
        step = max(1, MAX_SCORES // (heads * tokens))
        for first in range(0, queries, step):
            last = min(queries, first + step)
            own = query[start + first : start + last].float().unsqueeze(0)
            part = None if mask is None else mask[:, first:last]
            output[start + first : start + last] = _block(own, keys, values, part, scale, logit_cap)[0].to(
                output.dtype
            )
        start += queries
    return output
