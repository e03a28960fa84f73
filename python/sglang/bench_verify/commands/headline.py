"""``headline``: generate ``headline.json`` from the rows of a results directory."""

from __future__ import annotations

import argparse

from sglang.bench_verify import headline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--directory", default=headline.DEFAULT_DIRECTORY, help="where the rows lie")
    parser.add_argument("--check", action="store_true", help="fail when the file in place is out of date")


def run(args: argparse.Namespace) -> int:
    """Write or check the file; status 1 when a check finds it out of date."""
    if args.check:
        if headline.build(headline.collect(args.directory)) != headline.load(args.directory):
            print(f"{args.directory}/headline.json is not what the rows give: run `make readme-tables`")
            return 1
        return 0
    print(headline.write(args.directory))
    return 0
