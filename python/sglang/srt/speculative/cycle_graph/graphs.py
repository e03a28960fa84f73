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
from sglang.srt.speculative.cycle_graph.ranks import Size, same_logits
from sglang.srt.speculative.cycle_graph.wiring import Runners, prepare_relay, wire

logger = logging.getLogger(__name__)

# Left free on the device for prefills; a parent takes some megabytes, about as much as the graphs it is made of.
LEAST_ROOM = 1 << 30


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
    """The parent graphs of one worker, by whether rows are drawn and by batch size."""

    def __init__(self, width: int, exact: bool, runners: Runners | None = None) -> None:
        self.width = width
        self.exact = exact
        self._runners = runners
        self.entries: dict[tuple[bool, int], Entry] = {}
        self._sizes: dict[bool, list[int]] = {False: [], True: []}
        self._turn = 0

    def add(self, entry: Entry) -> None:
        """Take in one more graph."""
        drawn, batch = entry.buffers.sampling is not None, entry.buffers.batch
        self.entries[drawn, batch] = entry
        bisect.insort(self._sizes[drawn], batch)

    def keep(self, sizes: set[Size]) -> None:
        """Forget the graphs of all other sizes."""
        self.entries = {size: entry for size, entry in self.entries.items() if size in sizes}
        for drawn in self._sizes:
            self._sizes[drawn] = [batch for batch in self._sizes[drawn] if (drawn, batch) in sizes]

    def sizes(self, drawn: bool = False) -> list[int]:
        """Captured batch sizes, ascending."""
        return list(self._sizes[drawn])

    def size_for(self, batch: int, drawn: bool = False) -> int:
        """The captured size that ``batch`` requests run at; 0 if there is none."""
        if self.exact:
            return batch if (drawn, batch) in self.entries else 0
        sizes = self._sizes[drawn]
        place = bisect.bisect_left(sizes, batch)
        return sizes[place] if place < len(sizes) else 0

    def current(self, worker: Any) -> bool:
        """Whether the worker's passes are still those that the parents hold: a server may capture them anew."""
        return self._runners is None or self._runners.same(Runners.of(worker))

    def launch(self, rows: torch.Tensor, simulated: int = 0, sampling: Any = None) -> Launched:
        """Run one cycle for the requests at ``rows`` (int [n] on the device) on the current stream.

        ``sampling`` are upstream's parameters of the batch where rows are drawn.
        """
        live = rows.shape[0]
        drawn = sampling is not None
        entry = self.entries[drawn, self.size_for(live, drawn)]
        slot, self._turn = self._turn % RING, self._turn + 1
        kernels.load(entry.buffers, rows, slot, simulated, self._turn & 0x7FFFFFFF)
        if drawn:
            kernels.load_sampling(entry.buffers, sampling)
        begin = time.perf_counter()
        entry.graph.replay()
        counters.add("cycle_graph_launch_seconds", time.perf_counter() - begin)
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
    """Parent graphs for every batch size that all three passes were captured at, greedy and sampled.

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
    graphs = CycleGraphs(
        int(runners.verify.captured_req_width), bool(runners.verify.disable_padding), runners
    )
    pool = get_or_create_global_graph_memory_pool(torch.cuda)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    may_draw = same_logits(runner.model, int(runner.ps.tp_size))
    # Small batches first, so that it is the large ones that go without when room runs out.
    sizes = [(drawn, batch) for drawn in (False, True) for batch in runners.batches()]
    for drawn, batch in sizes:
        if drawn and not may_draw:
            continue
        if torch.cuda.mem_get_info()[0] < LEAST_ROOM:
            logger.warning(
                "cycle-graph: less than %.1f GiB are free, no graph for %s batches of %d; lower --mem-fraction-static",
                LEAST_ROOM / 2**30, "sampled" if drawn else "greedy", batch,
            )  # fmt: skip
            continue
        buffers = wire(runners, batch, relay, table, real_tokens=real_tokens, drawn=drawn)
        children = tuple(runners.captured(name, batch)[0] for name in ("draft", "verify", "draft_extend"))  # type: ignore[index]
        try:
            graphs.add(capture(buffers, ChildPasses(children), pool, stream))
        except Exception as error:  # Triton's compile errors are no RuntimeError
            if not drawn:
                raise
            # Greedy cycles stand; sampled ones take upstream's path, counted.
            logger.warning("cycle-graph: no graph for sampled cycles of %d requests: %s", batch, error)
            break
    torch.cuda.synchronize()
    seconds, used = time.perf_counter() - begin, free - torch.cuda.mem_get_info()[0]
    counters.add("cycle_graph_capture_seconds", seconds)
    counters.add("cycle_graph_capture_bytes", max(0, used))
    logger.info(
        "cycle-graph: one graph each for greedy batches of %s and sampled batches of %s: %.2f s, %.1f MiB",
        graphs.sizes(), graphs.sizes(drawn=True), seconds, used / 2**20,
    )  # fmt: skip
    return graphs
