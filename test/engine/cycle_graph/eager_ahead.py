"""Test-only: the projection made ahead on a CPU server, by the code that captures it on a GPU.

The branch is installed on the real target, and draft extend is upstream's graph runner through ``capture_extend``; a
backend that runs in place of recording stands in for CUDA graphs, and every cycle runs its "capture" again.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

MARK = "projection made ahead for rows"


class InPlace:
    """A graph backend whose capture is one run."""

    def __init__(self) -> None:
        self.outputs: dict[Any, Any] = {}

    def capture_session(self, stream: Any) -> Any:
        """Nothing to open."""
        return nullcontext()

    def capture_one(self, shape_key: Any, forward_fn: Any, **unused: Any) -> None:
        """Run and keep the output."""
        self.outputs[shape_key] = forward_fn()


class EagerAhead:
    """Branch and second draft extend of a CPU worker, for all batches up to ``most``."""

    def __init__(self, worker: Any, most: int) -> None:
        from sglang.srt.speculative.cycle_graph.ahead import graphs, start
        from sglang.srt.speculative.cycle_graph.ahead.branch import last_layer

        self.width = int(worker.speculative_num_draft_tokens)
        sizes = list(range(1, most + 1))
        start.MOST_ROWS = most * self.width  # type: ignore[misc]
        branch, reason = start.make_branch(worker, 1)
        assert branch is not None, reason
        self.branch, self.target = branch, worker.target_worker.model_runner
        branch.install(last_layer(self.target.model)[0], self.target.capture_tail_hooks)
        branch.projected.fill_(float("nan"))
        drafter = worker.draft_worker
        backend = drafter.draft_extend_attn_backend or drafter.draft_runner.attn_backend
        drafter.draft_extend_attn_backend = backend
        with _without_graphs(drafter.draft_runner, backend, sizes, self.width):
            self.runner = graphs.capture_extend(
                drafter, branch.projected, {self.width * size for size in sizes}
            )
        assert self.runner.capture_bs == sizes and self.runner.buffers.hidden_states is branch.projected

    def joined(self, rows: int) -> None:
        """The end of a captured pass of the target, which an eager one does not have."""
        for hook in self.target.capture_tail_hooks:
            hook(None, None, None, rows)

    def extend(self, batch: int) -> Any:
        """One pass over the static buffers; returns upstream's output."""
        self.runner.capture_one_shape(batch, None)
        return self.runner.backend.outputs[self.runner._make_graph_key(batch)]


@contextmanager
def _without_graphs(runner: Any, attention: Any, sizes: list[int], width: int) -> Any:
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as decode
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as extend

    def capture_stream() -> Any:
        return nullcontext(SimpleNamespace(stream=None))

    def logits(vocabulary: int, rows: int) -> torch.Tensor:
        return torch.full((rows, vocabulary), float("nan"))

    def plan(batch: Any, in_capture: bool = False) -> None:
        batch.extend_prefix_lens = (batch.seq_lens - width).clamp(min=0)
        batch.extend_num_tokens = batch.input_ids.shape[0]
        attention.init_forward_metadata(batch)

    attention.init_forward_metadata_out_graph = plan
    # This backend wants lengths that hold the new tokens; the Triton one takes any.
    attention.get_cuda_graph_seq_len_fill_value = lambda: width
    runner.graph_shared_output = SimpleNamespace(get_logits_buffer=logits)
    changes = (
        (extend, "resolve_decode_backend", lambda owner: InPlace()),
        (extend, "get_batch_sizes_to_capture", lambda *args: (list(sizes), [])),
        (decode, "graph_capture", capture_stream),
        (decode.DecodeCudaGraphRunner, "warmup", lambda owner: None),
    )
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
