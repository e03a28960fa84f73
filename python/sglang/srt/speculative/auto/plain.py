"""One plain decode step inside a speculating worker.

The same work as a server without speculation does: one token a request through the decode graph, and upstream's
sampler. The result is shaped as a verify of width one that accepted its only token, which is what the scheduler of a
speculating server takes.
"""

from __future__ import annotations

from typing import Any

import torch

# Marks a result, which must not count as a verify where it is settled, and what it hands to the next step.
MARK = "fork_plain_step"
# What a plain step changes on its batch.
CHANGED = (
    "forward_mode",
    "input_ids",
    "out_cache_loc",
    "seq_lens",
    "seq_lens_cpu",
    "seq_lens_sum",
    "spec_info",
)
# Kept on a request: how many of its tokens came from plain steps.
STEPS = "fork_plain_steps"


def plain_steps_of(request: Any) -> int:
    """Tokens of a request that came from plain steps."""
    return int(getattr(request, STEPS, 0))


Stub = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


class Stubs:
    """Tensors that a result has to carry and nobody reads on the device, made once."""

    def __init__(self, topk: int, hidden: int | None, dtype: torch.dtype, device: torch.device | str) -> None:
        self._shape = (topk, hidden, dtype, device)
        self._size = 0
        self._views: dict[int, Stub] = {}

    def get(self, size: int) -> Stub:
        """Top-k scores, top-k ids, draft hidden states and accept lengths (ones) of ``size`` requests.

        Accept lengths are on the host, where they are read: upstream's copy of a result leaves them alone.
        """
        if size > self._size:
            topk, hidden, dtype, device = self._shape
            self._size = max(size, 2 * self._size)
            self._views.clear()
            self._scores = torch.zeros(self._size, topk, dtype=torch.float32, device=device)
            self._ids = torch.zeros(self._size, topk, dtype=torch.int64, device=device)
            self._hidden = (
                torch.zeros(self._size, hidden, dtype=dtype, device=device) if hidden is not None else None
            )
            self._ones = torch.ones(self._size, dtype=torch.int32)
        found = self._views.get(size)
        if found is None:
            kept = self._hidden[:size] if self._hidden is not None else None
            found = self._scores[:size], self._ids[:size], kept, self._ones[:size]
            self._views[size] = found
        return found


def step(worker: Any, runtime: Any, batch: Any, on_publish: Any) -> Any:
    """Run one plain step of ``batch``; returns upstream's ``GenerationBatchResult``."""
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    runner = worker.target_worker.model_runner
    lengths, slots = batch.seq_lens, batch.req_pool_indices
    table = runner.req_to_token_pool.req_to_token
    longer = lengths + 1
    batch.forward_mode = ForwardMode.DECODE
    batch.input_ids = batch.spec_info.bonus_tokens.to(torch.int64)
    batch.out_cache_loc = table[slots, lengths].to(torch.int64)
    batch.seq_lens = longer
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None
    batch.spec_info = None
    forward_batch = ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )
    if on_publish is not None:
        # The next lengths are known before the pass: the scheduler may go on while it runs.
        on_publish(longer)
    with runtime.plain_graphs(runner):
        out = runner.forward(forward_batch)
    logits = out.logits_output
    tokens = runner.sample(logits, forward_batch)
    runtime.ring.store(slots, lengths, logits.hidden_states, tokens)
    _hand_over_fence(worker, runner)
    scores, ids, hidden, ones = runtime.stubs.get(lengths.shape[0])
    following = EagleDraftInput(bonus_tokens=tokens, topk_p=scores, topk_index=ids, hidden_states=hidden)
    setattr(following, MARK, True)
    result = GenerationBatchResult(
        logits_output=logits,
        next_token_ids=tokens,
        accept_lens=ones,
        can_run_cuda_graph=out.can_run_graph,
        speculative_num_draft_tokens=1,
        next_draft_input=following,
        new_seq_lens=longer,
        routed_experts_output=out.routed_experts_output,
        indexer_topk_output=out.indexer_topk_output,
        expert_distribution_metrics=out.expert_distribution_metrics,
        extra_keep_alive_refs=[forward_batch],
    )
    setattr(result, MARK, True)
    return result


def _hand_over_fence(worker: Any, runner: Any) -> None:
    """The scheduler waits for the event of the runner that reads last: here the target's, not the draft's."""
    last = worker.war_fastpath_runner
    if last is not runner:
        last.war_fastpath_read_done_event = runner.war_fastpath_read_done_event
        runner.war_fastpath_read_done_event = None


def settle(result: Any, requests: list[Any]) -> list[list[int]]:
    """What upstream's resolver of a verify does for one token a request, less what counts verifies.

    No grammar has to follow: a batch with one decodes by cycles. The next step is launched after this.
    """
    result.num_correct_drafts = 0
    result.num_correct_drafts_per_req_cpu = [0] * len(requests)
    for request in requests:
        if not (request.finished() or request.is_retracted):
            request.kv_committed_len += 1
            # Counted here and not at the launch: under overlap one more is launched after a request's end.
            setattr(request, STEPS, plain_steps_of(request) + 1)
    return [[token] for token in result.next_token_ids.tolist()]
