"""GQA / MHA attention for 1 to 8 query tokens a request, head sizes 64 to 256."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.launch import Operands, attend
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace


def gqa_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    context: KVContext,
    *,
    plan: SplitPlan,
    workspace: VerifyWorkspace,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    lse: torch.Tensor | None = None,
) -> None:
    """Write attention of ``q`` over the K and V pools into ``out``; safe to capture in a CUDA graph.

    q, out: [bs * tokens, q_heads, D], request-major. k_pool, v_pool: [slots, kv_heads, D]; the new tokens'
    rows are already written. lse: optional fp32 [bs * tokens, q_heads], natural log. ``k_scale`` and
    ``v_scale`` multiply fp8 pools. ``logit_cap`` > 0 applies cap * tanh(score / cap).
    Raises ValueError on any mismatch, before anything is launched.
    """
    attend(
        plan, workspace, Operands(q, k_pool, v_pool, out, lse), context, sm_scale, k_scale, v_scale, logit_cap
    )
