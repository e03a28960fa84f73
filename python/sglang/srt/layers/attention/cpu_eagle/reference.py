"""The attention oracle: one request, one head group at a time, in the precision asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["causal_mask", "reference_attention"]


def causal_mask(query_len: int, kv_len: int, window: int = -1) -> Tensor:
    """Return the mask of queries that are the last `query_len` of `kv_len` tokens, bool [query_len, kv_len].

    True means "sees". With `window` >= 0 a query sees itself and the `window` tokens before it.

    Raises:
        ValueError: more queries than tokens.
    """
    if query_len > kv_len:
        raise ValueError(f"{query_len} queries cannot be the last of {kv_len} tokens")
    own = torch.arange(kv_len - query_len, kv_len).unsqueeze(1)
    key = torch.arange(kv_len).unsqueeze(0)
    mask = key <= own
    if window >= 0:
        mask &= key >= own - window
    return mask


def reference_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    *,
    slots: Sequence[Tensor],
    query_lens: Sequence[int],
    scale: float,
    masks: Sequence[Tensor | None] | None = None,
    logit_cap: float = 0.0,
    window: int = -1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attend over a slot pool and return (output, log-sum-exp).

    Args:
        query: [tokens, query heads, D], requests one after another.
        key_pool: [pool size, KV heads, D]. Query head h reads KV head h // (query heads / KV heads).
            Absorbed MLA is one KV head of kv_lora_rank + rope columns.
        value_pool: [pool size, KV heads, Dv]; for absorbed MLA the first kv_lora_rank columns of the keys.
        slots: per request, the pool rows of its tokens in order, the newest last.
        query_lens: queries per request.
        scale: factor on the dot products.
        masks: per request bool [queries, tokens], True where a query sees a token; None means causal, with
            the queries as the last tokens.
        logit_cap: c > 0 replaces a score s by c * tanh(s / c).
        window: see `causal_mask`; used only where no mask is given.
        dtype: precision of every step, and of the results.

    Returns:
        output [tokens, query heads, Dv] and natural-log LSE [tokens, query heads], both in `dtype`, on the
        query's device. A query that sees nothing has output 0 and LSE -inf.
    """
    tokens, heads, _ = query.shape
    kv_heads, value_dim = value_pool.shape[1:]
    if sum(query_lens) != tokens or len(slots) != len(query_lens):
        raise ValueError(
            f"query has {tokens} rows for {len(slots)} requests, query_lens {list(query_lens)} do not match"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be shared evenly by {kv_heads} KV heads")
    output = torch.zeros(tokens, heads, value_dim, dtype=dtype, device=query.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=dtype, device=query.device)
    start = 0
    for request, (rows, query_len) in enumerate(zip(slots, query_lens, strict=True)):
        mask = masks[request] if masks is not None else None
        if mask is None:
            mask = causal_mask(query_len, rows.numel(), window)
        mask = mask.to(query.device)
        index = rows.to(device=key_pool.device, dtype=torch.int64)
        keys, values = key_pool[index].to(dtype), value_pool[index].to(dtype)
        own = query[start : start + query_len].to(dtype)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            score = own[:, head] @ keys[:, shared].T * scale
            if logit_cap > 0:
                score = logit_cap * torch.tanh(score / logit_cap)
            score = score.masked_fill(~mask, float("-inf"))
            total = torch.logsumexp(score, dim=-1)
            weight = torch.where(mask, torch.exp(score - total.unsqueeze(-1)), 0.0)
            output[start : start + query_len, head] = weight @ values[:, shared]
            lse[start : start + query_len, head] = total
        start += query_len
    return output, lse
