"""Test-only: the draft's prefetch on a CPU server, by the code that captures on a GPU.

Draft extend is captured by upstream's own graph runner, with a backend that runs in place of recording; the patched
constructor puts the hooks around it. Then the hooks stay in for the eager cycles.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

MARK = "prefetch around a capture:"
SETTING = "SGLANG_SPEC_DRAFT_PREFETCH"


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


def capture(worker: Any, most: int) -> Any:
    """Capture a draft extend of every batch up to ``most``; returns the plan with its counts, hooks installed."""
    from sglang.srt.speculative.cycle_graph.contexts import as_draft, state_stays
    from sglang.srt.speculative.cycle_graph.prefetch.branch import Branch
    from sglang.srt.speculative.cycle_graph.prefetch.start import prefetch_of
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    drafter = worker.draft_worker
    backend = drafter.draft_extend_attn_backend or drafter.draft_runner.attn_backend
    drafter.draft_extend_attn_backend = backend
    sizes = list(range(1, most + 1))
    joins: Counter[str] = Counter()

    def join(branch: Any) -> None:
        joins["all"] += 1

    # On a GPU a pass whose end is missed would end its capture with an error.
    Branch.join = join  # type: ignore[method-assign]
    width = int(worker.speculative_num_draft_tokens)
    with (
        _without_graphs(drafter.draft_runner, backend, sizes, width),
        as_draft(drafter),
        state_stays(backend),
    ):
        runner = EAGLEDraftExtendCudaGraphRunner(drafter)
    assert sorted(runner.capture_bs) == sizes and len(runner.backend.outputs) == most
    prefetch = prefetch_of(drafter)
    assert prefetch is not None
    passes = joins["all"]
    assert passes == most and set(prefetch.branch.asked.values()) == {passes}, (passes, prefetch.branch.asked)
    left = [module for module in drafter.draft_runner.model.modules() if _hooks(module)]
    assert not left, "hooks stayed behind the capture"
    prefetch.install()
    return prefetch


def check(prefetch: Any, passes: int) -> None:
    """Every point once in each of the draft's ``passes`` of a cycle, those between the passes once."""
    between = {"verified", "extended"}
    expected = {point: 1 if point in between else passes for point, parts in prefetch.plan.items() if parts}
    found = dict(prefetch.branch.asked)
    assert found == expected and set(found) > between, (found, expected)


def _hooks(module: torch.nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


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
