"""Building the parent graphs, one a captured batch size, and launching them."""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from sglang.fork import counters
from sglang.srt.speculative.cycle_graph import kernels, program
from sglang.srt.speculative.cycle_graph.buffers import RING, CycleBuffers
from sglang.srt.speculative.cycle_graph.driver import add_child
from sglang.srt.speculative.cycle_graph.wiring import Runners, prepare_relay, wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChildPasses:
    """The passes of a capture: upstream's graphs as child nodes."""

    graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]

    def draft(self) -> None:
        """See ``program.Passes``."""
        add_child(self.graphs[0])

    def verify(self) -> None:
        """See ``program.Passes``."""
        add_child(self.graphs[1])

    def extend(self) -> None:
        """See ``program.Passes``."""
        add_child(self.graphs[2])


class _NoPasses:
    """Stands in for the passes while the glue kernels are compiled."""

    def draft(self) -> None:
        """Nothing."""

    def verify(self) -> None:
        """Nothing."""

    def extend(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Entry:
    """One captured batch size."""

    buffers: CycleBuffers
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True)
class Launched:
    """Where the host finds the results of a launch, once the step's copies are done.

    ``tokens`` int32 [n * W], ``lengths`` int32 [n], ``good`` int32 [n], ``marks`` int64 [MARKS]: pinned memory.
    """

    batch: int
    tokens: torch.Tensor
    lengths: torch.Tensor
    good: torch.Tensor
    marks: torch.Tensor

    def phases(self) -> dict[str, float]:
        """Device milliseconds of verify, accept and draft extend, by the device's own clock."""
        times = self.marks.tolist()
        names = ("verify", "sample", "draft_extend")
        spans = zip(names, times[1:], times[2:], strict=False)
        return {name: max(0, stop - start) / 1e6 for name, start, stop in spans}


class CycleGraphs:
    """The parent graphs of one worker."""

    def __init__(self, width: int, exact: bool) -> None:
        self.width = width
        self.exact = exact
        self.entries: dict[int, Entry] = {}
        self._sizes: list[int] = []
        self._turn = 0

    def add(self, entry: Entry) -> None:
        """Take in one more batch size."""
        self.entries[entry.buffers.batch] = entry
        bisect.insort(self._sizes, entry.buffers.batch)

    def size_for(self, batch: int) -> int:
        """The captured size that ``batch`` requests run at; 0 if there is none."""
        if self.exact:
            return batch if batch in self.entries else 0
        place = bisect.bisect_left(self._sizes, batch)
        return self._sizes[place] if place < len(self._sizes) else 0

    def launch(self, rows: torch.Tensor, simulated: int = 0) -> Launched:
        """Run one cycle for the requests at ``rows`` (int [n] on the device) on the current stream."""
        live = rows.shape[0]
        entry = self.entries[self.size_for(live)]
        slot, self._turn = self._turn % RING, self._turn + 1
        kernels.load(entry.buffers, rows, slot, simulated)
        entry.graph.replay()
        results = entry.buffers.results
        return Launched(
            entry.buffers.batch,
            results.tokens[slot, : live * self.width],
            results.lengths[slot, :live],
            results.good[slot, :live],
            results.marks[slot],
        )


def capture(buffers: CycleBuffers, passes: ChildPasses, pool: Any, stream: Any) -> Entry:
    """Capture one parent graph.

    The glue is run once before, with no live request and no pass, so that nothing compiles or loads during the
    capture; it then writes nothing but padding.
    """
    kernels.load(buffers, buffers.control.rows[:0], 0, 0)
    program.run(buffers, kernels, _NoPasses())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        program.run(buffers, kernels, passes)
    return Entry(buffers, graph)


def build(worker: Any, future_map: Any, *, real_tokens: bool) -> CycleGraphs:
    """Parent graphs for every batch size that all three passes were captured at.

    Raises:
        ValueError, GraphError, RuntimeError: a buffer is not as expected, or the driver refuses; the caller then
            leaves the server on the three graphs.
    """
    from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool

    runners = Runners.of(worker)
    runner = worker.target_worker.model_runner
    begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    relay = prepare_relay(future_map, runners.draft.buffers.hidden_states[:1])
    table = runner.req_to_token_pool.req_to_token
    graphs = CycleGraphs(int(runners.verify.captured_req_width), bool(runners.verify.disable_padding))
    pool = get_or_create_global_graph_memory_pool(torch.cuda)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for batch in reversed(runners.batches()):
        buffers = wire(runners, batch, relay, table, real_tokens=real_tokens)
        children = tuple(runners.captured(name, batch)[0] for name in ("draft", "verify", "draft_extend"))  # type: ignore[index]
        graphs.add(capture(buffers, ChildPasses(children), pool, stream))
    torch.cuda.synchronize()
    seconds, used = time.perf_counter() - begin, free - torch.cuda.mem_get_info()[0]
    counters.add("cycle_graph_capture_seconds", seconds)
    counters.add("cycle_graph_capture_bytes", max(0, used))
    logger.info(
        "cycle-graph: batch sizes %s captured as one graph each in %.2f s, %.1f MiB",
        sorted(graphs.entries), seconds, used / 2**20,
    )  # fmt: skip
    return graphs
