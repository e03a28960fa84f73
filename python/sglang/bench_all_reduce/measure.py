"""Microseconds of one step: CUDA graph replays between events on a GPU, a wall clock on a processor.

Two figures on a GPU. ``chain``: reduction behind reduction, nothing else. ``between``: what a reduction adds to a
graph in which a tiny kernel follows each of them, that is the time of such a graph less that of the tiny kernels
alone. No model reduces twice in a row, so the second one is what a server pays; where a method leaves more than
kernels in a graph (NCCL records an event after each launch, which the next launch waits for), the two differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.bench_all_reduce import graph_nodes
from sglang.bench_all_reduce.methods import Method

#: Reductions in one graph: a layer has two, a model a hundred; their launch costs are those of a graph node.
STEPS = 50
#: Of a graph that writes its own buffers only; 1 replay warms up.
REPLAYS = 10
#: A figure is milliseconds of work: a device that is not done with one by then stands still.
STILL_S = 5.0
#: The same for first calls, in which a rank may compile or connect.
FIRST_S = 20.0

#: Brings the ranks together: told whether this rank is well, it returns whether all are. Collective.
Meet = Callable[[bool], bool]


class StoodStill(RuntimeError):
    """A device did not end what a figure consists of, on this rank or on another; raised on every rank."""


@dataclass
class Figures:
    """Of one method and message.

    Attributes:
        chain: us a step, one figure a repeat.
        between: us that a step adds among other kernels; empty on a processor.
        nodes: nodes of the chain's graph by kind, of all its steps; empty where they cannot be counted.
    """

    chain: list[float]
    between: list[float] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)


def samples(method: Method, x: torch.Tensor, repeats: int, meet: Meet, steps: int = STEPS) -> Figures:
    """Figures measured on this rank. Collective.

    Args:
        method: what to measure; not a missing one.
        x: [rows, hidden]. Zeros: a chain of in-place sums would leave the range of bf16.
        repeats: figures wanted.
        meet: brings the ranks together before each figure, and behind all of them.
        steps: reductions a replay on a GPU, a round on a processor.

    Raises:
        StoodStill: on every rank; work of this rank may still be on the device.
    """
    step = method.prepare(x)
    if x.device.type == "cuda":
        return _graphs(method, lambda: step(x), x.device, repeats, meet, steps)
    step(x)
    found = []
    for _ in range(repeats):
        _together(meet, True)
        start = time.perf_counter()
        for _ in range(steps):
            step(x)
        found.append((time.perf_counter() - start) * 1e6 / steps)
    return Figures(found)


def _graphs(
    method: Method,
    step: Callable[[], None],
    device: torch.device,
    repeats: int,
    meet: Meet,
    steps: int,
) -> Figures:
    pad = torch.zeros(1, dtype=torch.int32, device=device)

    def tiny() -> None:
        pad.add_(1)

    def spaced() -> None:
        step()
        tiny()

    with method.session():
        for _ in range(2):
            spaced()
        _together(meet, settled(FIRST_S))
        chain, between, alone = (_captured(work, steps) for work in (step, spaced, tiny))
        nodes = _nodes(step, steps)
    _together(meet, True)  # a capture takes a rank longer than another
    figures = [_replayed(graph, repeats, meet, steps) for graph in (chain, between, alone)]
    return Figures(figures[0], added(figures[1], figures[2]), nodes)


def added(with_step: list[float], without: list[float]) -> list[float]:
    """What a step adds: each figure of the graph that has it less the median of the one that has not."""
    rest = statistics.median(without)
    return [figure - rest for figure in with_step]


def _captured(work: Callable[[], None], steps: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            work()
    return graph


def _nodes(step: Callable[[], None], steps: int) -> dict[str, int]:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(steps):
            step()
    try:
        return graph_nodes.count(int(graph.raw_cuda_graph()))
    except (AttributeError, OSError, RuntimeError):
        return {}  # an explanation of a figure, not a figure


def _replayed(graph: Any, repeats: int, meet: Meet, steps: int) -> list[float]:
    graph.replay()
    _together(meet, settled())
    found = []
    for _ in range(repeats):
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        # The first replay absorbs that ranks leave the meeting at different times.
        graph.replay()
        events[0].record()
        for _ in range(REPLAYS):
            graph.replay()
        events[1].record()
        _together(meet, settled())
        found.append(events[0].elapsed_time(events[1]) * 1e3 / (REPLAYS * steps))
    return found


def settled(limit_s: float = STILL_S) -> bool:
    """Wait until this device has done what the current stream was given; False if it has not after ``limit_s``."""
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    deadline = time.monotonic() + limit_s
    while not done.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def _together(meet: Meet, well: bool) -> None:
    if not meet(well):
        raise StoodStill("another rank was not done" if well else "not done in time")
