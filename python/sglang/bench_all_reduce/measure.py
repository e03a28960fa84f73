"""Microseconds of one step: CUDA graph replays between events on a GPU, a wall clock on a processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.bench_all_reduce.methods import Method, Step

#: Reductions in one graph: a layer has two, a model a hundred; their launch costs are those of a graph node.
STEPS = 50
#: Of a graph that writes its own buffers only; 1 replay warms up.
REPLAYS = 10


def samples(
    method: Method, x: torch.Tensor, repeats: int, barrier: Callable[[], None], steps: int = STEPS
) -> list[float]:
    """``repeats`` figures in microseconds a step, measured on this rank. Collective.

    Args:
        method: what to measure; not a missing one.
        x: [rows, hidden]. Zeros: a chain of in-place sums would leave the range of bf16.
        repeats: figures wanted.
        barrier: brings the ranks together before each figure.
        steps: reductions a replay on a GPU, a round on a processor.
    """
    step = method.prepare(x)
    if x.device.type == "cuda":
        return _graph(method, step, x, repeats, barrier, steps)
    step(x)
    found = []
    for _ in range(repeats):
        barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(x)
        found.append((time.perf_counter() - start) * 1e6 / steps)
    return found


def _graph(
    method: Method, step: Step, x: torch.Tensor, repeats: int, barrier: Callable[[], None], steps: int
) -> list[float]:
    with method.session():
        for _ in range(2):
            step(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(steps):
                step(x)
    barrier()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        barrier()
        # The first replay absorbs that ranks leave the barrier at different times.
        graph.replay()
        events[0].record()
        for _ in range(REPLAYS):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        found.append(events[0].elapsed_time(events[1]) * 1e3 / (REPLAYS * steps))
    return found
