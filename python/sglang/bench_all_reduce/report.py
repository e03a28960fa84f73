"""From figures to a text for a person, rows for the repository, and a table for the server."""

from __future__ import annotations

from sglang.bench_all_reduce.methods import CUSTOM, GLOO, NCCL
from sglang.bench_all_reduce.worker import Job, Result
from sglang.bench_verify.rows import Metric, Row
from sglang.srt.distributed.one_shot.policy import (
    FUSED,
    OURS,
    PLAIN,
    STOCK,
    Key,
    Point,
    Table,
    from_measurements,
)

_NAMES = {PLAIN: "sum", FUSED: "sum + add + norm"}


def key_of(job: Job, result: Result) -> Key:
    """The machine of a run."""
    link = "cpu" if job.device == "cpu" else job.machine.link(list(job.devices))
    return Key(result.gpu, link, len(job.devices), job.machine.driver)


def table_of(job: Job, result: Result, taken: str) -> Table:
    """The table of a run. ``stock`` is what upstream would use: its custom all-reduce where it runs, else NCCL.

    Raises:
        ValueError: nothing of upstream's was measured, so that there is nothing to compare with.
    """
    points = []
    for kind in (PLAIN, FUSED):
        for rows in job.rows:
            us = {
                name: Metric.of(result.figures[name, kind, rows], "us").value
                for name in (*OURS, CUSTOM, NCCL, GLOO)
                if (name, kind, rows) in result.figures
            }
            stock = next((us[name] for name in (CUSTOM, NCCL, GLOO) if name in us), None)
            if stock is None:
                continue
            kept = {name: figure for name, figure in us.items() if name in OURS}
            size = rows * job.hidden * job.dtype.itemsize
            points.append(Point(kind, rows, size, {**kept, STOCK: stock}))
    return from_measurements(key_of(job, result), points, f"measured here {taken}")


def rows_of(job: Job, result: Result, machine: str, started: str) -> list[Row]:
    """One row a method and message, in the repository's format; a missing figure is a row with its reason."""
    key = key_of(job, result)
    found = []
    for method, kind, rows in [*result.figures, *result.missing]:
        samples = result.figures.get((method, kind, rows))
        found.append(
            Row(
                bench="all_reduce",
                machine=machine,
                variant=result.variants[method, kind],
                case={
                    "ranks": key.ranks,
                    "link": key.link,
                    "method": method,
                    "kind": kind,
                    "rows": rows,
                    "hidden": job.hidden,
                    "dtype": str(job.dtype).removeprefix("torch."),
                },
                metrics={"us": Metric.of(samples, "us")} if samples else {},
                started=started,
                note=result.missing.get((method, kind, rows), ""),
            )
        )
    return found


def text(job: Job, result: Result) -> str:
    """The figures as lines: one table for each kind, microseconds, a dash for what is missing."""
    lines = []
    for kind in (PLAIN, FUSED):
        names = [name for name, of in result.variants if of == kind]
        lines.append(f"\n{_NAMES[kind]}, us ({len(job.devices)} ranks, hidden {job.hidden})")
        lines.append("".join(f"{word:>12}" for word in ("rows", "bytes", *names)))
        for rows in job.rows:
            cells = [str(rows), str(rows * job.hidden * job.dtype.itemsize)]
            for name in names:
                samples = result.figures.get((name, kind, rows))
                cells.append(f"{Metric.of(samples, 'us').value:.1f}" if samples else "-")
            lines.append("".join(f"{cell:>12}" for cell in cells))
    reasons = sorted({f"{name} {_NAMES[kind]}: {why}" for (name, kind, _), why in result.missing.items()})
    return "\n".join([*lines, *(["", "missing:"] if reasons else []), *(f"  {reason}" for reason in reasons)])
