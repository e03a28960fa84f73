"""Stand-ins for the two attention kernels that upstream's Triton backend calls.

Upstream's ``forward_extend`` and ``forward_decode`` do everything around the kernel (KV write, fp8 scales, the
refusals of their own) and then call ``self.extend_attention_fwd`` or ``self.decode_attention_fwd``. A backend with
a binding holds one of these objects there: it runs the split-KV kernel where the call is known and admitted, and
the stock kernel otherwise, so upstream's code is neither copied nor skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.verify.binding import Binding, HeadShape
from sglang.srt.layers.attention.verify.calls import Call, Refusal
from sglang.srt.layers.attention.verify.gqa import gqa_attention
from sglang.srt.layers.attention.verify.mla import mla_attention

Kernel = Callable[..., Any]


def _same_memory(k_pool: torch.Tensor, v_pool: torch.Tensor) -> bool:
    """Whether the values are a window of the keys: the latent cache of absorbed MLA."""
    return k_pool.data_ptr() == v_pool.data_ptr()


def _shape(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> HeadShape:
    return HeadShape(
        kind="mla" if _same_memory(k_pool, v_pool) else "gqa",
        q_heads=q.shape[1],
        kv_heads=k_pool.shape[1],
        qk_dim=q.shape[2],
        v_dim=v_pool.shape[2],
        q_dtype=q.dtype,
        kv_dtype=k_pool.dtype,
    )


def serve(
    binding: Binding,
    call: Call,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None,
    *,
    causal: bool = True,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    sliding_window_size: int = -1,
    xai_temperature_len: int = -1,
    score_mod: Any = None,
    page_size: int = 1,
    lse_extend: torch.Tensor | None = None,
) -> Refusal | None:
    """Run the split-KV kernel for ``call``; return the refusal, with nothing launched, if it is not admitted.

    Arguments from ``q`` on are those of the stock kernels: q [rows, heads, qk_dim], pools [slots, kv_heads, dim],
    out [rows, heads, v_dim].
    """
    if k_pool.dim() != 3:
        return Refusal(call.mode, "KV pool is not [slots, heads, dim]")
    if lse_extend is not None:
        return Refusal(call.mode, "partial results are asked for (decode context parallelism)")
    shape = _shape(q, k_pool, v_pool)
    if shape.kind == "mla" and k_scale != v_scale:
        return Refusal(
            call.mode, "latent cache with different key and value scales", f"{k_scale} and {v_scale}"
        )
    request = binding.request(
        shape,
        call.batch,
        call.tokens,
        page_size,
        causal=causal,
        sliding_window=sliding_window_size,
        sinks=sinks is not None,
        score_mod=score_mod is not None,
        temperature_len=xai_temperature_len,
        logit_cap=logit_cap,
    )
    admission, plan = binding.decide(request)
    if plan is None:
        return Refusal(call.mode, admission.reason)
    if not plan.use:
        return Refusal(call.mode, "the stock kernel is faster here", plan.reason)
    workspace = binding.scratch.fit(plan)
    if workspace is None:
        return Refusal(call.mode, "scratch would have to grow during a graph capture", plan.reason)
    scale = sm_scale or shape.qk_dim**-0.5
    if shape.kind == "mla":
        mla_attention(
            q,
            k_pool,
            out,
            call.context,
            plan=plan,
            workspace=workspace,
            sm_scale=scale,
            k_scale=k_scale,
            work=binding.work_for(call.mode),
        )
    else:
        gqa_attention(
            q,
            k_pool,
            v_pool,
            out,
            call.context,
            plan=plan,
            workspace=workspace,
            sm_scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            logit_cap=logit_cap,
        )
    return None


def _finish(binding: Binding, call: Call, refusal: Refusal | None) -> bool:
    """Count the outcome; True when the stock kernel is not needed."""
    if refusal is not None:
        binding.refuse(refusal)
    else:
        binding.count(call.mode, ours=True)
    binding.current = None
    return refusal is None


def extend_kernel(binding: Binding, stock: Kernel) -> Kernel:
    """The object for ``extend_attention_fwd``: serves target verify and draft extend, passes the rest on."""

    def extend_attention_fwd(
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: torch.Tensor | None,
        is_causal: bool,
        mask_indptr: torch.Tensor | None,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float | None = None,
        **extra: Any,
    ) -> Any:
        call = binding.current
        if call is not None:
            facts = {key: value for key, value in extra.items() if key in _SERVE_KEYWORDS}
            refusal = serve(
                binding, call, q, k_pool, v_pool, out, k_scale, v_scale, sm_scale, causal=is_causal, **facts
            )
            if _finish(binding, call, refusal):
                return None
        return stock(
            q,
            k_new,
            v_new,
            out,
            k_pool,
            v_pool,
            qo_indptr,
            kv_indptr,
            kv_indices,
            custom_mask,
            is_causal,
            mask_indptr,
            max_len_extend,
            k_scale,
            v_scale,
            sm_scale,
            **extra,
        )

    return extend_attention_fwd


def decode_kernel(binding: Binding, stock: Kernel) -> Kernel:
    """The object for ``decode_attention_fwd``: serves decode and the draft's decode steps."""

    def decode_attention_fwd(
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        out: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        attn_logits: torch.Tensor,
        attn_lse: torch.Tensor,
        num_kv_splits: torch.Tensor,
        max_kv_splits: int,
        sm_scale: float,
        k_scale: float,
        v_scale: float,
        **extra: Any,
    ) -> Any:
        call = binding.current
        if call is not None:
            facts = {key: value for key, value in extra.items() if key in _SERVE_KEYWORDS}
            refusal = serve(binding, call, q, k_pool, v_pool, out, k_scale, v_scale, sm_scale, **facts)
            if _finish(binding, call, refusal):
                return None
        return stock(
            q,
            k_pool,
            v_pool,
            out,
            kv_indptr,
            kv_indices,
            attn_logits,
            attn_lse,
            num_kv_splits,
            max_kv_splits,
            sm_scale,
            k_scale,
            v_scale,
            **extra,
        )

    return decode_attention_fwd


# The stock kernels' keywords that decide admission. The others (window offsets, PDL, MLA layout, auxiliary tensors
# of a score modifier) only matter to the stock kernels or come with one of these.
_SERVE_KEYWORDS = frozenset(
    {
        "logit_cap",
        "sinks",
        "sliding_window_size",
        "xai_temperature_len",
        "score_mod",
        "page_size",
        "lse_extend",
    }
)
