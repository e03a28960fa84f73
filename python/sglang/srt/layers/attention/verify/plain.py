"""The same function in plain torch, request by request: slow, host-synchronising, for machines without Triton."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.plan import SplitPlan


def _allowed(context: KVContext, b: int, length: int, tokens: int, device: torch.device) -> torch.Tensor:
    """[tokens, length] bool: which keys each row of request ``b`` sees."""
    prefix = length - tokens
    row = torch.arange(tokens, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    allowed = key < prefix + row + 1
    if context.tree_mask is not None:
        if context.mask_indptr is None:
            flat = context.tree_mask.reshape(-1)[b * tokens * tokens :][: tokens * tokens]
            tail = flat.reshape(tokens, tokens)
        else:
            start = int(context.mask_indptr[b])
            flat = context.tree_mask.reshape(-1)[start : start + tokens * length]
            tail = flat.reshape(tokens, length)[:, prefix:]
        allowed = torch.cat([key.expand(tokens, -1)[:, :prefix] >= 0, tail.bool()], dim=1)
    return allowed


def attend_plain(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    context: KVContext,
    plan: SplitPlan,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    lse: torch.Tensor | None,
) -> None:
    """Reference path behind ``mla_attention`` and ``gqa_attention``; see them for shapes."""
    r = plan.request
    tokens = r.tokens
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    for b in range(r.batch):
        length = int(context.seq_lens[b]) + (0 if context.lens_include_new else tokens)
        if context.req_to_token is not None and context.req_pool_indices is not None:
            request = int(context.req_pool_indices[b])
            if length <= 0 or request < 0:
                continue
            slots = context.req_to_token[request, :length].long()
        elif context.kv_indices is not None and context.kv_indptr is not None:
            start = int(context.kv_indptr[b])
            slots = context.kv_indices[start : start + length].long()
        else:
            raise ValueError("KVContext holds neither a request table nor kv_indices")
        rows = slice(b * tokens, (b + 1) * tokens)
        query = q[rows].float().transpose(0, 1)
        keys = k_pool[slots].float().transpose(0, 1).repeat_interleave(r.group, 0)
        values = v_pool[slots].float().transpose(0, 1).repeat_interleave(r.group, 0)
        scores = query @ keys.transpose(1, 2) * (sm_scale * k_scale)
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = scores.masked_fill(~_allowed(context, b, length, tokens, q.device), float("-inf"))
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.nan_to_num(torch.exp(scores - total[..., None]), nan=0.0)
        out[rows] = (weights @ values * v_scale).transpose(0, 1).to(out.dtype)
        if lse is not None:
            lse[rows] = total.transpose(0, 1)
