"""What fills a decode step or a speculative cycle, read from a torch profiler trace.

Figures are per cycle, over the cycles in the middle of the trace: start and end of a profile hold start-up work
of the profiler itself. A cycle is ``graphs`` graph launches long (decode: 1; draft, verify and draft extend: 3).
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

LAUNCHES = frozenset({"cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx"})
COPIES = frozenset({"cudaMemcpyAsync", "cudaMemcpy2DAsync"})
SYNCS = frozenset(
    {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize"}
)
GRAPH_LAUNCH = "cudaGraphLaunch"
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
MARGIN = 0.3


class TraceError(ValueError):
    """A trace that holds too few graph launches to tell cycles apart."""


@dataclass(frozen=True)
class Cycle:
    """One cycle, on average. Times in microseconds, the rest counts.

    ``busy_us`` is the time in which the device runs at least one kernel or copy; ``graph_launch_us`` the host
    time of its graph launches. ``kernels_by_time`` holds name -> (us, calls), ``host_ops`` the operators that the
    host called outside graphs, by calls.
    """

    cycles: float
    wall_us: float
    busy_us: float
    kernels: float
    graph_launches: float
    graph_launch_us: float
    launches_outside_graphs: float
    copies: float
    syncs: float
    kernels_by_time: Mapping[str, tuple[float, float]]
    host_ops: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)


def load(path: str | Path) -> list[Event]:
    """Events with a duration of a (gzipped) trace file."""
    file = Path(path)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [event for event in json.loads(raw)["traceEvents"] if "dur" in event]


def busy_time(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``(start, stop)`` spans."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total


def summarize(events: Sequence[Event], graphs: int, top: int = 25) -> Cycle:
    """Average cycle of a trace. Raises TraceError when it holds fewer than eight cycles."""
    launches = sorted(
        float(event["ts"]) for event in events if str(event.get("name", "")).startswith(GRAPH_LAUNCH)
    )
    if len(launches) < 8 * graphs:
        raise TraceError(f"{len(launches)} graph launches, needs {8 * graphs}; profile more tokens")
    first = int(len(launches) * MARGIN) // graphs * graphs
    last = int(len(launches) * (1 - MARGIN / 3)) // graphs * graphs
    begin, end = launches[first], launches[last]
    inside = [event for event in events if begin <= float(event["ts"]) < end]
    cycles = (bisect.bisect_left(launches, end) - bisect.bisect_left(launches, begin)) / graphs

    device = [event for event in inside if event.get("cat") in DEVICE]
    by_kernel: dict[str, list[float]] = {}
    for event in device:
        entry = by_kernel.setdefault(str(event["name"])[:100], [0.0, 0.0])
        entry[0] += float(event["dur"])
        entry[1] += 1
    heaviest = sorted(by_kernel.items(), key=lambda item: -item[1][0])[:top]
    operators = Counter(str(event["name"]) for event in _outermost(inside))

    def named(names: frozenset[str]) -> float:
        return sum(event.get("name") in names for event in inside) / cycles

    graph_calls = [event for event in inside if str(event.get("name", "")).startswith(GRAPH_LAUNCH)]
    return Cycle(
        cycles=cycles,
        wall_us=round((end - begin) / cycles, 1),
        busy_us=round(
            busy_time((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in device) / cycles, 1
        ),
        kernels=round(len(device) / cycles, 2),
        graph_launches=round(len(graph_calls) / cycles, 2),
        graph_launch_us=round(sum(float(e["dur"]) for e in graph_calls) / cycles, 1),
        launches_outside_graphs=round(named(LAUNCHES), 2),
        copies=round(named(COPIES), 2),
        syncs=round(named(SYNCS), 2),
        kernels_by_time={
            name: (round(us / cycles, 2), round(calls / cycles, 2)) for name, (us, calls) in heaviest
        },
        host_ops={name: round(count / cycles, 2) for name, count in operators.most_common(40)},
    )


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Operators that no other operator of the same thread encloses: what Python called."""
    found: list[Event] = []
    reached: dict[Any, float] = {}
    operators = (event for event in events if event.get("cat") == "cpu_op")
    for event in sorted(operators, key=lambda item: (float(item["ts"]), -float(item["dur"]))):
        stop = float(event["ts"]) + float(event["dur"])
        thread = (event.get("pid"), event.get("tid"))
        if float(event["ts"]) >= reached.get(thread, float("-inf")):
            found.append(event)
            reached[thread] = stop
    return found
