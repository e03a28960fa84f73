"""Plots from rows: cycle against context, break-even, stacked phases.

Needs matplotlib, which serving does not: the plots are made where the rows lie, not where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.bench_verify.errors import BenchError
from sglang.bench_verify.rows import Row, context_label
from sglang.bench_verify.soundness import PHASES

COLOURS = {"upstream": "#b5483a", "fork": "#2b6f8f"}
PHASE_COLOURS = ("#8fb4c9", "#2b6f8f", "#e0b04c", "#7a9e5f", "#9a9a9a")


class PlotError(BenchError):
    """No plotting library, or nothing to plot."""


def draw(rows: Sequence[Row], folder: str | Path, prefix: str = "") -> list[Path]:
    """Draw every plot that the rows allow; returns the files written."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError(
            "matplotlib is not installed: pip install matplotlib, or copy the rows to where it is"
        ) from error
    matplotlib.use("Agg")
    # Text stays text and ids are fixed, so that a plot made again from the same rows is the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "bench-verify", "axes.grid": True, "grid.alpha": 0.25}
    )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Any, Sequence[Row]], bool]] = {
        "cycle_by_context": cycle_by_context,
        "verify_by_context": verify_by_context,
        "break_even": break_even,
        "phases": phases,
    }
    written = []
    for name, function in plots.items():
        path = target / f"{prefix}{name}.svg"
        if _figure(function, rows, path):
            written.append(path)
    return written


def cycle_by_context(axes: Any, rows: Sequence[Row]) -> bool:
    """Decode and cycle of each variant against context, both axes logarithmic."""
    drawn = False
    for variant, colour in COLOURS.items():
        for metric, width, style in (("decode_ms", 0, "--"), ("cycle_ms", 3, "-")):
            points = _points(rows, variant, metric, width)
            if points:
                name = "decode" if width == 0 else f"EAGLE-3 cycle, {width} tokens verified"
                axes.plot(
                    *zip(*points, strict=True), style, marker="o", color=colour, label=f"{variant}: {name}"
                )
                drawn = True
    _context_axis(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.legend()
    return drawn


def verify_by_context(axes: Any, rows: Sequence[Row]) -> bool:
    """The verify alone, of each variant and verify width, against context, beside the decode it is compared with."""
    drawn = False
    widths = sorted({_width(row) for row in rows if "verify" in row.phases_ms and _width(row) > 1})
    for variant, colour in COLOURS.items():
        decode = _points(rows, variant, "decode_ms", 0)
        if decode:
            axes.plot(*zip(*decode, strict=True), "--", marker="o", color=colour, label=f"{variant}: decode")
        for width, style in zip(widths, ("-", "-.", ":", (0, (5, 1))), strict=False):
            points = _points(rows, variant, "verify", width)
            if points:
                label = f"{variant}: verify of {width} tokens"
                axes.plot(*zip(*points, strict=True), linestyle=style, marker="s", color=colour, label=label)
                drawn = True
    _context_axis(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    if drawn:
        axes.legend()
    return drawn


def break_even(axes: Any, rows: Sequence[Row]) -> bool:
    """Accept length that a cycle needs, against context; below 1 to 3 lies what a 3-token verify can keep."""
    drawn = False
    for variant, colour in COLOURS.items():
        decode = dict(_points(rows, variant, "decode_ms", 0)) or dict(
            _points(rows, "upstream", "decode_ms", 0)
        )
        points = [(c, ms / decode[c]) for c, ms in _points(rows, variant, "cycle_ms", 3) if c in decode]
        if points:
            axes.plot(*zip(*points, strict=True), "-", marker="o", color=colour, label=variant)
            drawn = True
    axes.axhspan(1, 3, color="#7a9e5f", alpha=0.15, label="accept lengths a 3-token verify can give")
    _context_axis(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("accept length needed to break even")
    axes.legend()
    return drawn


def phases(axes: Any, rows: Sequence[Row]) -> bool:
    """Phases of a cycle, stacked, a bar a variant and context."""
    chosen = [
        row
        for row in _newest(rows)
        if row.phases_ms and row.case.get("draft_tokens") == 3 and row.case.get("batch") == 1
    ]
    chosen.sort(key=lambda row: (_context(row), row.variant != "upstream"))
    if not chosen:
        return False
    labels = [f"{row.variant}\n{context_label(row.case.get('context'))}" for row in chosen]
    below = [0.0] * len(chosen)
    for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True):
        heights = [row.phases_ms.get(phase, 0.0) for row in chosen]
        axes.bar(labels, heights, bottom=below, color=colour, label=phase.replace("_", " "))
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for index, total in enumerate(below):
        axes.text(index, total, f"{total:.1f}", ha="center", va="bottom")
    # One serial verify at 64k would flatten every other bar.
    if max(below) > 8 * min(below):
        axes.set_yscale("symlog", linthresh=2 * min(below))
    axes.set_ylabel("ms a cycle")
    axes.legend()
    return True


def _figure(function: Callable[[Any, Sequence[Row]], bool], rows: Sequence[Row], path: Path) -> bool:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    try:
        drawn = function(axes, rows)
        if drawn:
            axes.set_title(_title(rows))
            figure.savefig(path, metadata={"Date": None})
        return drawn
    finally:
        pyplot.close(figure)


def _title(rows: Sequence[Row]) -> str:
    machines = ", ".join(sorted({row.machine for row in rows}))
    models = ", ".join(sorted({str(row.case["model"]) for row in rows if "model" in row.case}))
    return f"{models} on {machines}" if models else machines


def _points(rows: Sequence[Row], variant: str, metric: str, width: int) -> list[tuple[int, float]]:
    found = {
        _context(row): row.phases_ms[metric] if metric in row.phases_ms else row.metrics[metric].value
        for row in _newest(rows)
        if row.variant == variant
        and (metric in row.metrics or metric in row.phases_ms)
        and row.case.get("batch") == 1
        and row.case.get("draft_tokens") == width
        and "context" in row.case
    }
    return sorted(found.items())


def _width(row: Row) -> int:
    value = row.case.get("draft_tokens")
    return value if isinstance(value, int) and row.case.get("batch") == 1 else 0


def _newest(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order measured, so that a later one of the same case replaces an earlier one."""
    return sorted(rows, key=lambda row: row.started)


def _context(row: Row) -> int:
    value = row.case.get("context")
    return int(value) if isinstance(value, (int, float)) else 0


def _context_axis(axes: Any, rows: Sequence[Row]) -> None:
    contexts = sorted({_context(row) for row in rows if _context(row)})
    if contexts:
        axes.set_xscale("log")
        axes.set_xticks(contexts, [context_label(context) for context in contexts])
        axes.minorticks_off()
    axes.set_xlabel("context, tokens")
