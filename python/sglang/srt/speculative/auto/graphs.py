"""Plain decode graphs of a target that speculates.

Upstream's decode runner captures verify as soon as its model runner speculates. For the time of one construction the
model runner says that it does not; the runner that results is upstream's own decode runner. It uses the attention
backend of verify: both graphs fill that backend's buffers before each replay, and they never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.contexts import state_stays
from sglang.srt.speculative.graph_policy import capture
from sglang.srt.speculative.graph_policy.room import LIVE_HIDDEN_ROWS, ModelFacts, Room, estimate
from sglang.srt.speculative.graph_policy.sizes import KindPlan


def build(model_runner: Any, reserved: int) -> tuple[Any, str | None]:
    """Capture plain decode beside verify: the graph runner, or None and why there is none.

    Args:
        model_runner: the target's. All its ranks have to call this.
        reserved: bytes that the switch allocates beside the graphs.

    Raises:
        CaptureOutOfMemory: memory ran out although the estimate had fitted.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner, get_batch_sizes_to_capture
    from sglang.srt.utils import get_available_gpu_memory

    class PlainDecodeGraphs(DecodeCudaGraphRunner):  # type: ignore[misc]
        """Decode of one token a request, with the hidden states that the draft will want later."""

        def capture(self) -> None:
            self.capture_hidden_mode = CaptureHiddenMode.FULL
            super().capture()

    def free() -> int:
        return int(get_available_gpu_memory(model_runner.device, model_runner.gpu_id) * (1 << 30))

    sizes, _ = get_batch_sizes_to_capture(model_runner, 1)
    plan = KindPlan("decode", 1, tuple(sizes))
    facts = capture.model_facts(model_runner, "decode")
    # The workspace of verify is there and larger.
    facts = type(facts)(**{**vars(facts), "attention_row_bytes": 0})
    # Nobody has to ask for the switch, so it takes nothing that a prefill needs later.
    kept = reserved + prefill_bytes(model_runner.server_args, facts)
    room = Room(estimate(plan, facts), free(), kept)
    lacking = on_any_rank(None if room.fits else room.text(), model_runner.tp_group)
    if lacking is not None:
        return None, lacking
    try:
        with _as_plain(model_runner):
            graphs = capture.watched(
                plan, facts, free, lambda: PlainDecodeGraphs(model_runner), speak=model_runner.ps.tp_rank == 0
            )
    except capture.CaptureOutOfMemory as error:
        error.args = (f"{error}; --speculative-auto off captures none of these",)
        raise
    return graphs, None


def prefill_bytes(server_args: Any, facts: ModelFacts) -> int:
    """Bytes of activations of the largest prefill; free memory holds them once graphs are captured."""
    tokens = int(server_args.chunked_prefill_size or 0)
    if tokens <= 0:
        tokens = int(server_args.max_prefill_tokens or 0)
    return tokens * LIVE_HIDDEN_ROWS * facts.hidden * facts.dtype_bytes


def on_any_rank(reason: str | None, group: Any) -> str | None:
    """The first rank's reason that has one. Free memory differs, and a rank that captures alone would wait forever."""
    size = int(getattr(group, "world_size", 1) or 1)
    if size == 1:
        return reason
    found: list[str | None] = [None] * size
    torch.distributed.all_gather_object(found, reason, group=group.cpu_group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None), None)


@contextmanager
def _as_plain(model_runner: Any) -> Iterator[None]:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = model_runner.spec_algorithm
    model_runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        with state_stays(model_runner.attn_backend):
            yield
    finally:
        model_runner.spec_algorithm = algorithm
