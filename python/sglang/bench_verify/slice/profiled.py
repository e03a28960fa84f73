"""Profiles of engines of a fleet: what a step or a cycle consists of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.bench_verify.slice.engines import EngineError, Fleet
from sglang.bench_verify.slice.trace import TraceError, load, summarize


def profiles(
    fleet: Fleet, engines: Sequence[str], context: int, tokens: int, folder: Path
) -> list[dict[str, Any]]:
    """A profile of each of ``engines`` at one context; one that fails goes to ``fleet.failures``.

    Args:
        fleet: engines that are up.
        engines: their names.
        context: prompt tokens of the profiled request.
        tokens: tokens that it generates under the profiler.
        folder: where traces go, one folder an engine.
    """
    found = []
    for name in engines:
        engine = fleet.engines[name]
        split = engine.spec.steps and "cycle-graph" in engine.spec.topics_off
        graphs = 3 if split else 1
        try:
            trace = engine.profile(context, tokens, folder / name)
            cycle = summarize(load(trace), graphs)
        except (EngineError, TraceError, OSError) as error:
            fleet.failures[f"profile of {name}"] = str(error)
            continue
        found.append({"engine": name, "context": context, **cycle.as_dict()})
        print(
            f"{name:24} {context:7} wall {cycle.wall_us:.0f} us, device busy {cycle.busy_us:.0f}, kernels "
            f"{cycle.kernels:.0f}, outside graphs {cycle.launches_outside_graphs:.1f}, copies {cycle.copies:.1f}, "
            f"syncs {cycle.syncs:.1f}, graph launch {cycle.graph_launch_us:.0f} us",
            flush=True,
        )
        for kernel, (us, calls) in list(cycle.kernels_by_time.items())[:8]:
            print(f"    {us:8.1f} us {calls:6.1f} x  {kernel}", flush=True)
    return found
