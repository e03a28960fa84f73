"""``plots FILE...``: cycle against context, break-even and stacked phases, as SVG."""

from __future__ import annotations

import argparse

from sglang.bench_verify.plots import PlotError, draw
from sglang.bench_verify.rows import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("files", nargs="+", help="results files")
    parser.add_argument("--folder", default="benchmark/results/plots")
    parser.add_argument("--prefix", default="", help="start of the file names")


def run(args: argparse.Namespace) -> int:
    """Draw what the rows allow; status 1 when they allow nothing."""
    rows = [row for path in args.files for row in Results.load(path).rows]
    try:
        written = draw(rows, args.folder, args.prefix)
    except PlotError as error:
        print(f"error: {error}")
        return 1
    for path in written:
        print(path)
    if not written:
        print("nothing to plot: no row has a context with decode_ms, cycle_ms or phases")
    return 0 if written else 1
