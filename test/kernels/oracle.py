"""Attention by the definition, in float64, one request and one row at a time. Shares no code with the product."""

from __future__ import annotations

import torch


def attention_oracle(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request. q [T, H, Dk], keys [L, Hkv, Dk], values [L, Hkv, Dv], visible [T, L] bool.

    Returns (output [T, H, Dv] float64, natural-log LSE [T, H] float64); a row that sees nothing is 0 and -inf.
    """
    tokens, heads, _ = q.shape
    group = heads // keys.shape[1]
    out = torch.zeros(tokens, heads, values.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float64, device=q.device)
    q, keys, values = q.double(), keys.double(), values.double()
    for t in range(tokens):
        seen = visible[t].nonzero()[:, 0]
        if seen.numel() == 0:
            continue
        k = keys[seen].repeat_interleave(group, 1)
        v = values[seen].repeat_interleave(group, 1)
        score = torch.einsum("hd,lhd->hl", q[t], k) * sm_scale
        if logit_cap > 0:
            score = logit_cap * torch.tanh(score / logit_cap)
        lse[t] = torch.logsumexp(score, dim=1)
        out[t] = torch.einsum("hl,lhd->hd", torch.softmax(score, dim=1), v)
    return out, lse


def chain_visible(length: int, tokens: int) -> torch.Tensor:
    """[tokens, length] bool of a causal chain: row t sees keys [0, length - tokens + t + 1)."""
    rows = torch.arange(tokens)[:, None]
    return torch.arange(length)[None, :] < length - tokens + rows + 1


def tree_visible(length: int, tree: torch.Tensor) -> torch.Tensor:
    """[T, length] bool: the whole prefix, and of the last T keys what ``tree`` [T, T] allows."""
    tokens = tree.shape[0]
    visible = torch.ones(tokens, length, dtype=torch.bool)
    visible[:, length - tokens :] = tree.bool()
    return visible
