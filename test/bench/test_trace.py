"""Averages of a trace: cycles, busy time, launches outside graphs, operators that Python called."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.bench_verify.slice.trace import TraceError, busy_time, load, summarize

PERIOD_US = 1000.0


def event(name: str, category: str, at: float, lasts: float, thread: int = 1) -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": at, "dur": lasts, "pid": 1, "tid": thread}


def cycle(number: int) -> list[dict[str, Any]]:
    """Three graph launches; one eager operator that launches a kernel and copies; overlapping kernels."""
    start = number * PERIOD_US
    found = [event("cudaGraphLaunch", "cuda_runtime", start + 300 * i, 20.0) for i in range(3)]
    found += [
        event("aten::add", "cpu_op", start + 100, 30.0),
        event("aten::copy_", "cpu_op", start + 105, 10.0),
        event("cudaLaunchKernel", "cuda_runtime", start + 110, 5.0),
        event("cudaMemcpyAsync", "cuda_runtime", start + 140, 5.0),
        event("cudaStreamSynchronize", "cuda_runtime", start + 150, 5.0),
        event("kernel_a", "kernel", start + 200, 100.0, thread=7),
        event("kernel_b", "kernel", start + 250, 100.0, thread=8),
        event("kernel_a", "kernel", start + 500, 50.0, thread=7),
    ]
    return found


def test_one_cycle_on_average() -> None:
    """B11 (sglang#29960): the host's time of a graph launch stands apart from the device's busy time."""
    events = [item for number in range(20) for item in cycle(number)]
    found = summarize(events, graphs=3)
    assert found.wall_us == pytest.approx(PERIOD_US)
    assert found.busy_us == pytest.approx(200.0)  # 150 of the overlapping pair, 50 of the third
    assert (found.kernels, found.graph_launches, found.graph_launch_us) == (3, 3, 60)
    assert (found.launches_outside_graphs, found.copies, found.syncs) == (1, 1, 1)
    assert found.kernels_by_time == {"kernel_a": (150.0, 2.0), "kernel_b": (100.0, 1.0)}
    assert found.host_ops == {"aten::add": 1.0}


def test_too_few_cycles_are_an_error() -> None:
    with pytest.raises(TraceError, match="profile more tokens"):
        summarize([item for number in range(7) for item in cycle(number)], graphs=3)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [([], 0.0), ([(0, 1), (2, 3)], 2.0), ([(0, 5), (1, 2), (4, 7)], 7.0), ([(3, 4), (0, 1)], 2.0)],
)
def test_busy_time_is_the_union(spans: list[tuple[float, float]], expected: float) -> None:
    assert busy_time(spans) == expected


def test_a_gzipped_trace_is_read_without_events_that_have_no_duration(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    document = {"traceEvents": [event("k", "kernel", 1, 2), {"name": "meta", "ph": "M"}]}
    file.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert [item["name"] for item in load(file)] == ["k"]
