"""Absorbed MLA attention for 1 to 8 query tokens a request, latent cache 576 wide, value = its first 512."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.launch import Operands, attend
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.work_list import PassList
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace


def mla_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    context: KVContext,
    *,
    plan: SplitPlan,
    workspace: VerifyWorkspace,
    sm_scale: float,
    k_scale: float = 1.0,
    lse: torch.Tensor | None = None,
    work: PassList | None = None,
) -> None:
    """Write attention of ``q`` over the latent cache into ``out``; safe to capture in a CUDA graph.

    q: [bs * tokens, heads, 576], request-major. latent: [slots, 1, 576] (the new tokens' rows are already
    written). out: [bs * tokens, heads, 512], any float dtype. lse: optional fp32 [bs * tokens, heads],
    natural log. ``k_scale`` multiplies an fp8 cache (stored = true / k_scale), keys and values alike.
    ``work`` keeps what the calls of one forward pass have in common (``work_list``).
    Raises ValueError on any mismatch, before anything is launched.
    """
    if latent.dim() == 2:
        latent = latent[:, None]
    value = latent[..., : plan.request.v_dim]
    x = Operands(q, latent, value, out, lse)
    attend(plan, workspace, x, context, sm_scale, k_scale, k_scale, 0.0, work)
