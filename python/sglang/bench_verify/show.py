"""Results on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from sglang.bench_verify.rows import Row, context_label
from sglang.bench_verify.soundness import PHASES, doubts, phases_over_cycle
from sglang.bench_verify.verdict import Verdict

Table = tuple[list[str], list[list[str]]]
WIDEST = 240


def print_table(title: str, table: Table) -> None:
    """A rich table, or aligned columns where rich is not installed."""
    head, rows = table
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(title)
        widths = [max(len(line[index]) for line in [head, *rows]) for index in range(len(head))]
        for line in [head, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    rich: Any = RichTable(title=title)
    for name in head:
        rich.add_column(name, justify="right")
    for line in rows:
        rich.add_row(*line)
    console = Console()
    # A log file has no width; a table squeezed to fewer columns than it needs says nothing.
    wide = Console(width=WIDEST)
    needed = wide.measure(rich).maximum
    if not console.is_terminal:
        wide.print(rich)
    elif needed <= console.width:
        console.print(rich)
    else:
        print(title)
        for line in rows:
            pairs = (
                f"{name}: {cell}" for name, cell in zip(head, line, strict=True) if cell not in ("", "-")
            )
            print(textwrap.fill(", ".join(pairs), max(20, console.width), subsequent_indent="  "))


def slice_rows(rows: Sequence[Row]) -> Table:
    """Cases of a slice with the parts of a cycle."""
    head = [
        "context",
        "batch",
        "variant",
        "draft tokens",
        "decode ms",
        "cycle ms",
        *PHASES,
        "sum/cycle",
        "launch",
        "experts",
        "spread",
    ]
    lines = []
    for row in sorted(
        rows, key=lambda r: (_int(r, "batch"), _int(r, "context"), _int(r, "draft_tokens"), r.variant)
    ):
        figure = row.metrics.get("cycle_ms") or row.metrics.get("decode_ms")
        lines.append(
            [
                context_label(row.case["context"]),
                str(row.case["batch"]),
                row.variant,
                str(row.case["draft_tokens"]),
                _metric(row, "decode_ms"),
                _metric(row, "cycle_ms"),
                *(f"{row.phases_ms[name]:.3f}" if name in row.phases_ms else "-" for name in PHASES),
                _sum_over_cycle(row),
                f"{row.phases_ms['launch']:.3f}" if "launch" in row.phases_ms else "-",
                _metric(row, "experts_per_layer", 1),
                f"{figure.spread:.3f}" if figure else "-",
            ]
        )
    return head, lines


def five_runs(rows: Sequence[Row]) -> Table:
    """The table of the field report: one line a run."""
    head = ["server", "start", "run", "tokens", "s", "tok/s", "prompt tokens", "kept a verify", "note"]
    lines = []
    for row in rows:
        lines.append(
            [
                str(row.case.get("server", row.variant)),
                str(row.case.get("start", "")),
                str(row.case.get("run", "")),
                _metric(row, "completion_tokens", 0),
                _metric(row, "seconds", 2),
                _metric(row, "tok_s", 1),
                _metric(row, "prompt_tokens", 0),
                _metric(row, "kept_length", 2),
                row.note,
            ]
        )
    return head, lines


def print_verdicts(found: Sequence[Verdict]) -> None:
    """The verdicts, one a line."""
    for verdict in found:
        print(verdict.text())


def _sum_over_cycle(row: Row) -> str:
    """Phases over the cycle, with a mark where they do not stand."""
    ratio = phases_over_cycle(row)
    return "-" if ratio is None else f"{ratio:.3f}{' !' if doubts(row) else ''}"


def _metric(row: Row, name: str, digits: int = 3) -> str:
    return f"{row.metrics[name].value:.{digits}f}" if name in row.metrics else "-"


def _int(row: Row, name: str) -> int:
    value = row.case.get(name)
    return int(value) if isinstance(value, (int, float)) else 0
