"""Command line of the bench: ``python -m sglang.bench_verify COMMAND --help``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Command -> (module with `add_arguments(parser)` and `run(args) -> int`, one line of help). Modules are
# imported when their command is named, so that `diff` needs neither torch nor a plotting library.
COMMANDS = {
    "demo": (
        "sglang.bench_verify.commands.demo",
        "the shipped model on this processor, with and without speculation (the default)",
    ),
    "server": ("sglang.bench_verify.commands.server", "measure a running server on real prompts"),
    "launch": (
        "sglang.bench_verify.commands.launch",
        "baseline, upstream and fork servers in turn, forth and back",
    ),
    "slice": (
        "sglang.bench_verify.commands.slice",
        "a rank of a large model on one GPU: upstream against fork, draft lengths 0 to 4",
    ),
    "diff": (
        "sglang.bench_verify.commands.diff",
        "name what differs between two runs and which difference is a suspect",
    ),
    "headline": (
        "sglang.bench_verify.commands.headline",
        "generate benchmark/results/headline.json from the rows",
    ),
    "tables": ("sglang.bench_verify.commands.tables", "regenerate the marked tables of README and docs"),
    "plots": ("sglang.bench_verify.commands.plots", "cycle against context, break-even and phases as SVG"),
    "environment": (
        "sglang.bench_verify.commands.environment",
        "print the environment record of this machine",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv) or ["demo"]
    parser = argparse.ArgumentParser(prog="python -m sglang.bench_verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), "")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    args = parser.parse_args(words)
    return int(importlib.import_module(COMMANDS[args.command][0]).run(args))


if __name__ == "__main__":
    sys.exit(main())
