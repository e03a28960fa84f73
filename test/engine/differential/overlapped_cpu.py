"""Test-only plugin: overlapped scheduling of a speculative server on a CPU.

Upstream switches it off there because a CPU has no streams. In program order it still is the loop that GPU
servers run: the next verify is launched before the results of the last one are read, so host-side records of a
request lag one step. That lag is what the tests want; nothing is gained in speed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

ENTRY = "overlapped_cpu"
MARK = "overlapped scheduling is forced"


def gather(indices: Any, *buffers: Any) -> tuple[Any, ...]:
    """Rows of each buffer by one index, in place of upstream's Triton kernel."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def activate() -> None:
    """Entry point: keep overlap on, and replace what only exists on a GPU."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda arguments: None
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.managers import overlap_utils

        overlap_utils.gather_spec_extras = gather
    print(MARK, file=sys.stderr, flush=True)
