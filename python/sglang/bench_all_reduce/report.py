"""From figures to a text for a person, rows for the repository, and a table for the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang.bench_all_reduce.flashinfer_fused import NAME as FLASHINFER
from sglang.bench_all_reduce.methods import CUSTOM, GLOO, NCCL, table_name
from sglang.bench_all_reduce.worker import APART, ENDED, STILL, Case, Job, Result
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

#: A figure that a second pass, in the other order, does not repeat this well is named.
ORDER = 1.05
_NAMES = {PLAIN: "sum", FUSED: "sum + add + norm"}


def key_of(job: Job, result: Result) -> Key:
    """The machine of a run."""
    link = "cpu" if job.device == "cpu" else job.machine.link(list(job.devices))
    return Key(result.gpu, link, len(job.devices), job.machine.driver)


def table_of(job: Job, result: Result, taken: str) -> Table:
    """The table of a run. ``stock`` is what upstream would use: FlashInfer's fused one where it was measured, else its
    custom all-reduce where it runs, else NCCL.

    A way that once stood still, gave up or left the ranks' counters apart, with any message, is in no table. What a reduction
    adds among other kernels decides, where that was measured: no model reduces twice in a row.

    Raises:
        ValueError: nothing of upstream's was measured, so that there is nothing to compare with.
    """
    points = []
    still = {name for (name, _, _), why in result.missing.items() if why.startswith((STILL, APART, ENDED))}
    for kind in (PLAIN, FUSED):
        for rows in job.rows:
            us = {
                name: Metric.of(_deciding(result, (table_name(name), kind, rows)), "us").value
                for name in (*OURS, FLASHINFER, CUSTOM, NCCL, GLOO)
                if (table_name(name), kind, rows) in result.figures and table_name(name) not in still
            }
            stock = next((us[name] for name in (FLASHINFER, CUSTOM, NCCL, GLOO) if name in us), None)
            if stock is None:
                continue
            kept = {name: figure for name, figure in us.items() if name in OURS}
            size = rows * job.hidden * job.dtype.itemsize
            points.append(Point(kind, rows, size, {**kept, STOCK: stock}))
    return from_measurements(key_of(job, result), points, f"measured here {taken}")


def _deciding(result: Result, case: Case) -> list[float]:
    """Microseconds by which a method is chosen; noise below nothing is no figure."""
    between = result.between.get(case, [])
    return between if between and Metric.of(between, "us").value > 0 else result.figures[case]


def _passes(result: Result, case: Case) -> list[float]:
    """The median of each pass over all methods, in the order measured."""
    samples = result.figures[case]
    size = max(1, len(samples) // max(1, result.passes))
    return [Metric.of(samples[at : at + size], "us").value for at in range(0, len(samples), size)]


def _metrics(result: Result, case: Case) -> dict[str, Metric]:
    if case not in result.figures:
        return {}
    found = {"us": Metric.of(result.figures[case], "us")}
    if case in result.between:
        found["us_between"] = Metric.of(result.between[case], "us")
    if result.passes > 1:
        found |= {
            f"us_pass_{number}": Metric(value, "us")
            for number, value in enumerate(_passes(result, case), start=1)
        }
    return found


def rows_of(job: Job, result: Result, machine: str, started: str) -> list[Row]:
    """One row a method and message, in the repository's format; a missing figure is a row with its reason."""
    key = key_of(job, result)
    found = []
    for method, kind, rows in dict.fromkeys([*result.figures, *result.missing]):
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
                metrics=_metrics(result, (method, kind, rows)),
                counters={
                    f"{name} nodes a step": each
                    for name, each in result.nodes.get((method, kind, rows), {}).items()
                },
                started=started,
                note=result.missing.get((method, kind, rows), ""),
            )
        )
    return found


def text(job: Job, result: Result) -> str:
    """The figures as lines: tables by kind, microseconds, a dash for what is missing; then what explains them."""
    lines = []
    for kind in (PLAIN, FUSED):
        ways = (("one behind the other", result.figures), ("among other kernels", result.between))
        for words, figures in ways:
            if words == ways[0][0] or any(case[1] == kind for case in figures):
                lines += _grid(job, result, kind, words, figures)
    return "\n".join([*lines, *_order(result), *_graphs(result), *_missing(result)])


def _grid(
    job: Job, result: Result, kind: str, words: str, figures: Mapping[Case, Sequence[float]]
) -> list[str]:
    names = [name for name, of in result.variants if of == kind]
    lines = [
        f"\n{_NAMES[kind]}, {words}, us ({len(job.devices)} ranks, hidden {job.hidden})",
        "".join(f"{word:>14}" for word in ("rows", "bytes", *names)),
    ]
    for rows in job.rows:
        cells = [str(rows), str(rows * job.hidden * job.dtype.itemsize)]
        for name in names:
            samples = figures.get((name, kind, rows))
            cells.append(f"{Metric.of(samples, 'us').value:.2f}" if samples else "-")
        lines.append("".join(f"{cell:>14}" for cell in cells))
    return lines


def _order(result: Result) -> list[str]:
    """Cases whose figure depends on when they were measured."""
    if result.passes < 2:
        return []
    found = []
    for case in result.figures:
        medians = _passes(result, case)
        if min(medians) > 0 and max(medians) > ORDER * min(medians):
            words = ", ".join(f"{value:.2f}" for value in medians)
            found.append(
                f"  {case[0]} {_NAMES[case[1]]}, {case[2]} rows: {words} us in passes of opposite order"
            )
    return (
        ["", "depends on the order:", *found] if found else ["", "no figure depends on the order of methods"]
    )


def _graphs(result: Result) -> list[str]:
    """What a step leaves in a graph, of the smallest message of each method."""
    first: dict[tuple[str, str], dict[str, float]] = {}
    for (name, kind, _), nodes in result.nodes.items():
        first.setdefault((name, kind), nodes)
    lines = [
        f"  {name} {_NAMES[kind]}: {', '.join(f'{number:.2f} {each}' for each, number in sorted(nodes.items()))}"
        for (name, kind), nodes in first.items()
    ]
    return ["", "graph nodes a step:", *lines] if lines else []


def _missing(result: Result) -> list[str]:
    reasons = sorted({f"{name} {_NAMES[kind]}: {why}" for (name, kind, _), why in result.missing.items()})
    return ["", "missing:", *(f"  {reason}" for reason in reasons)] if reasons else []
