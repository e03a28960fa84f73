"""The attention backend of EAGLE on a CPU, in upstream's interface."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.cpu_eagle.admission import layer_refusal
from sglang.srt.layers.attention.cpu_eagle.attend import attend
from sglang.srt.layers.attention.cpu_eagle.plan import (
    AttentionPlan,
    decode_plan,
    draft_step_plan,
    extend_plan,
    verify_plan,
)
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

__all__ = ["CpuEagleAttention", "CpuEagleDraftSteps"]


class CpuEagleAttention(AttentionBackend):  # type: ignore[misc]
    """Prefill, decode, target verify and draft extend.

    New keys and values are written to the pool first; queries then read everything from the pool. What they
    read is one plan a forward pass (see `plan`), made in `init_forward_metadata`.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        # Held here: a forward batch may drop its references before the last layer has run.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len = runner.model_config.context_len
        self.plan: AttentionPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the plan of one forward pass."""
        mode = forward_batch.forward_mode
        table = self.req_to_token_pool.req_to_token
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if mode.is_idle():
            self.plan = None
        elif mode.is_decode():
            self.plan = decode_plan(table, rows, seq_lens)
        elif mode.is_target_verify():
            spec = forward_batch.spec_info
            # A chain's mask is causal order; anything else (trees, and the irregular trees that other
            # algorithms mark with -1) needs the mask that was built for it.
            tree = None if spec.tree_topk == 1 else spec.custom_mask
            self.plan = verify_plan(table, rows, seq_lens, spec.draft_token_num, tree)
        else:
            self.plan = extend_plan(table, rows, seq_lens, forward_batch.extend_seq_lens)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """Attend with one query a request (or draft branch). Shapes as in `forward_extend`."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """Attend with the queries of a prefill, verify or draft extend.

        Args:
            q: [tokens, heads * D] or [tokens, heads, D].
            k, v: new keys and values, or None where another layer has written them.
            save_kv_cache: False where the layer has written the pool itself.

        Returns:
            [tokens, heads * Dv], dtype of q.

        Raises:
            NotImplementedError: the layer asks for what this backend does not do.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> Tensor:
        reason = layer_refusal(layer, extra)
        if reason is not None:
            raise NotImplementedError(
                f"layer {layer.layer_id} asks for {reason}, which EAGLE's CPU attention does not do; serve this "
                "model without --speculative-algorithm, with SGLANG_FORK_DISABLE=cpu-eagle, or on a GPU"
            )
        if self.plan is None:
            raise RuntimeError(
                "attention ran before init_forward_metadata: no plan for "
                f"{forward_batch.forward_mode.name} of {forward_batch.batch_size} requests"
            )
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        output = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.plan,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            window=layer.sliding_window_size,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
        )
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: the plan is made after the draft, in `init_forward_metadata`."""

    def support_triton(self) -> bool:
        """Return False: slots are assigned by the portable ops, not by Triton kernels."""
        return False


class CpuEagleDraftSteps:
    """The draft's decode steps: one backend a step, planned together before the first."""

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self.topk = topk
        self.num_steps = num_steps
        self.page_size = runner.page_size
        # The last draft token comes out of the last forward, so steps - 1 forwards draft `steps` tokens.
        self.attn_backends = [CpuEagleAttention(runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step of the draft of one batch; `seq_lens` is the prefix that all steps share."""
        for step, backend in enumerate(self.attn_backends):
            backend.plan = draft_step_plan(
                backend.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                step=step,
                num_steps=self.num_steps,
                topk=self.topk,
                page_size=self.page_size,
            )
