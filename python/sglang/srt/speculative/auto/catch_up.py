"""The draft's KV is made whole again after plain steps.

A draft of one layer makes its keys and values from what enters it: embedding and the target's hidden state. No
attention is needed for them, so all owed rows of all requests are written by one forward pass under a backend that
stores and attends to nothing. The next draft starts from the last row, which does attend: that one row goes through
upstream's own draft extend, with its graph.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.auto.rows import RowRing
from torch import Tensor

# Rows of one pass: what is gathered for it (and the draft's activations) stay small beside a prefill's.
PASS_ROWS = 1024


class KeysOnly:
    """In the place of an attention backend: writes keys and values into the pool, and answers zeros."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store ``k`` and ``v`` at the batch's slots; the output ``[rows, heads * width]`` is zero."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        if save_kv_cache and k is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, None)
            scales = (layer.k_scale, layer.v_scale)
            pool = self._backend.token_to_kv_pool
            if scales == (None, None):
                pool.set_kv_buffer(layer, place, k, v)
            else:
                pool.set_kv_buffer(layer, place, k, v, *scales)
        return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)


def owed_rows(owed: list[int]) -> tuple[list[int], list[int]]:
    """For requests that owe so many rows: index of the request of each row, and how far it lies behind the end."""
    index = [request for request, rows in enumerate(owed) for _ in range(rows)]
    behind = [back for rows in owed for back in range(rows, 0, -1)]
    return index, behind


def write_rows(draft: Any, ring: RowRing, req_to_token: torch.Tensor, batch: Any, owed: list[int]) -> int:
    """Write the draft's KV of the last ``owed[i]`` positions of request i; returns how many rows that were.

    Args:
        draft: upstream's draft worker.
        ring: where the rows wait.
        req_to_token: the pool's page table ``[slots, context]``.
        batch: a decode batch; ``seq_lens`` counts the tokens that the target has processed.
        owed: rows a request.
    """
    index, behind = owed_rows(owed)
    if not index:
        return 0
    device = batch.seq_lens.device
    picks = torch.tensor([index, behind], dtype=torch.int64)
    if device.type != "cpu":
        picks = picks.pin_memory().to(device, non_blocking=True)
    for first in range(0, len(index), PASS_ROWS):
        part = picks[:, first : first + PASS_ROWS]
        slots = batch.req_pool_indices[part[0]]
        positions = batch.seq_lens[part[0]].to(torch.int64) - part[1]
        hidden, tokens = ring.read(slots, positions)
        places = req_to_token[slots, positions].to(torch.int64)
        _forward(draft.draft_runner, tokens, hidden, slots, positions, places)
    return len(index)


def _forward(
    runner: Any,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
) -> None:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    rows = tokens.shape[0]
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=rows,
        input_ids=tokens,
        req_pool_indices=slots,
        seq_lens=positions + 1,
        out_cache_loc=places,
        seq_lens_sum=None,
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=EagleDraftExtendInput(
            hidden_states=hidden, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        ),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_logprob=False,
    )
    forward_batch.num_token_non_padded_cpu = rows
    with forward_context(ForwardContext(attn_backend=KeysOnly(runner.attn_backend))):
        runner.model.forward(tokens, positions, forward_batch)


def seed(worker: Any, ring: RowRing, req_to_token: torch.Tensor, batch: Any) -> None:
    """Give ``batch.spec_info`` what the next draft starts from, computed from the last row of each request.

    Upstream's draft extend is handed a verify that accepted one token: it writes that row (again) and two rows past
    the end, which the next verify's extend overwrites as it does rejected ones.
    """
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    draft = worker.draft_worker
    width = int(draft.speculative_num_draft_tokens)
    last = batch.seq_lens - 1
    count = last.shape[0]
    slots = batch.req_pool_indices
    hidden, tokens = ring.read(slots, last)
    columns = torch.arange(width, device=last.device)
    places = req_to_token[slots.unsqueeze(1), (last.unsqueeze(1) + columns)].to(torch.int64).reshape(-1)
    states = hidden.new_zeros(count, width, hidden.shape[1])
    states[:, 0] = hidden
    following = tokens.new_zeros(count, width)
    following[:, 0] = tokens
    shadow = copy.copy(batch)
    shadow.seq_lens = last
    if shadow.seq_lens_cpu is not None:
        shadow.seq_lens_cpu = shadow.seq_lens_cpu - 1
        shadow.seq_lens_sum = None
    shadow.out_cache_loc = places
    found = EagleDraftInput(bonus_tokens=tokens)
    draft._draft_extend_for_decode(
        shadow,
        SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=states.reshape(count * width, -1)),
            accept_lens=torch.ones(count, dtype=torch.int32, device=last.device),
            next_token_ids=following.reshape(-1),
            next_draft_input=found,
        ),
    )
    info = batch.spec_info
    info.topk_p, info.topk_index, info.hidden_states = found.topk_p, found.topk_index, found.hidden_states
