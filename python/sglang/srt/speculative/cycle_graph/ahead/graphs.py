"""A draft extend that starts from projected states, captured for the few small sizes that the branch serves."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.contexts import state_stays

KIND = "draft_extend_ahead"


def capture_extend(drafter: Any, projected: torch.Tensor, rows: set[int]) -> Any:
    """Upstream's graph runner of draft extend, whose hidden states are ``projected``.

    A draft projects what is not of its own width, so with these inputs its graph holds no projection.

    Args:
        drafter: upstream's draft worker, with its attention backends.
        projected: [R, H].
        rows: sizes to capture, in rows.

    Raises:
        Exception: what upstream raises where a capture fails.
    """
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    class DraftExtendAhead(EAGLEDraftExtendCudaGraphRunner):  # type: ignore[misc]
        """Draft extend of the sizes that are served, over the branch's buffer."""

        fork_kind = KIND
        fork_rows = frozenset(rows)

        def capture(self) -> None:
            own: Any = self
            own.capture_bs = [size for size in own.capture_bs if size * own.captured_req_width in rows]
            own.buffers.hidden_states = projected
            super().capture()

    with state_stays(drafter.draft_extend_attn_backend):
        return DraftExtendAhead(drafter)
