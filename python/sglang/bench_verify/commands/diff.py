"""``diff A.json B.json``: what differs and which difference is a suspect."""

from __future__ import annotations

import argparse
import dataclasses
import json

from sglang.bench_verify.diff import compare, render
from sglang.bench_verify.rows import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("a", help="results file of the run to compare with")
    parser.add_argument("b", help="results file of the run in question")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the report. Exit status 0: no figure moved, 3: some did, 2: nothing could be compared."""
    report = compare(Results.load(args.a), Results.load(args.b))
    if args.json:
        document = dataclasses.asdict(report)
        document["suspects"] = [item.name for item in report.suspects]
        print(json.dumps(document, indent=1))
    else:
        print(render(report))
    if not report.compared:
        return 2
    return 3 if report.moved else 0
