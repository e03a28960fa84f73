"""Rows that follow from other measurements of a slice: profiles, and the cost of the statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from sglang.bench_verify.rows import Metric, Row, Scalar
from sglang.bench_verify.slice.engines import EngineSpec
from sglang.bench_verify.slice.shapes import Shape

STATISTICS = "verify-stats"
PROFILE_UNITS = {
    "wall_us": "us",
    "busy_us": "us",
    "graph_launch_us": "us",
    "kernels": "count",
    "graph_launches": "count",
    "launches_outside_graphs": "count",
    "copies": "count",
    "syncs": "count",
}


def profile_row(entry: Mapping[str, Any], spec: EngineSpec, shape: Shape, machine: str) -> Row:
    """The row of one profiled engine; ``wall_us`` is under the profiler, which slows the host down."""
    case: dict[str, Scalar] = {
        "model": shape.name,
        "layers": shape.layers,
        "context": int(entry["context"]),
        "batch": 1,
        "draft_tokens": spec.draft_tokens,
        "engine": spec.name,
    }
    metrics = {
        name: Metric(float(entry[name]), unit) for name, unit in PROFILE_UNITS.items() if name in entry
    }
    kernels = entry.get("kernels_by_time") or {}
    counters: dict[str, Scalar] = {
        f"us.{name}": round(float(us), 1) for name, (us, _) in list(kernels.items())[:12]
    }
    return Row("profile", machine, spec.variant, case, metrics, counters=counters, topics_off=spec.topics_off)


def statistics_cost(rows: Iterable[Row]) -> list[Row]:
    """What the statistics cost a cycle: the fork with its topic on against the fork with it off.

    Repeats are paired in the order they were measured, so that a drifting clock cancels.
    """
    kept = list(rows)
    found = []
    for row in kept:
        if row.variant != "fork" or row.topics_off or "cycle_ms" not in row.metrics:
            continue
        off = next((other for other in kept if _same(row, other) and other.topics_off == (STATISTICS,)), None)
        if off is None:
            continue
        on_ms, off_ms = row.metrics["cycle_ms"], off.metrics["cycle_ms"]
        pairs = list(zip(on_ms.samples, off_ms.samples, strict=False)) or [(on_ms.value, off_ms.value)]
        percents = [100.0 * (a / b - 1.0) for a, b in pairs]
        metrics = {"overhead_percent": Metric.of(percents, "percent"), "on_ms": on_ms, "off_ms": off_ms}
        found.append(
            dataclasses.replace(row, bench="stats_cost", metrics=metrics, phases_ms={}, counters={}, note="")
        )
    return found


def _same(row: Row, other: Row) -> bool:
    names = ("model", "layers", "context", "batch", "draft_tokens", "backend", "router")
    return (
        other.bench == row.bench
        and other.variant == "fork"
        and "cycle_ms" in other.metrics
        and all(other.case.get(name) == row.case.get(name) for name in names)
    )
