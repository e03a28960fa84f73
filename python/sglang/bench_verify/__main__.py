"""Command line of the bench: ``python -m sglang.bench_verify COMMAND --help``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sglang.bench_verify.errors import BenchError, Interrupted

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


INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for what the user can mend, 130 when interrupted."""
    words = with_command(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m sglang.bench_verify",
        description=__doc__,
        epilog="Without a command the demo runs; its options may follow at once.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), "")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    args = parser.parse_args(words)
    before: Any = None
    with contextlib.suppress(ValueError):  # only a main thread may set it; elsewhere nothing ends us that way
        before = signal.signal(signal.SIGTERM, _terminated)
    try:
        status = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
        return status
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe has seen enough. The interpreter would flush once more at its end, and complain.
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def with_command(words: Sequence[str]) -> list[str]:
    """The words with the default command in front where they begin with none."""
    found = list(words)
    if not found or (found[0].startswith("-") and found[0] not in ("-h", "--help")):
        found.insert(0, "demo")
    return found


def _terminated(number: int, frame: FrameType | None) -> None:
    # As Ctrl-C: servers are stopped on the way out, and rows measured so far are kept.
    raise Interrupted


def lenient_output() -> None:
    """A locale without the characters of a table must not end a run at its last line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    lenient_output()
    sys.exit(main())
