"""``tables FILE...``: regenerate the marked tables of README and docs."""

from __future__ import annotations

import argparse

from sglang.bench_verify import headline, tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("files", nargs="*", default=["README.md"], help="Markdown files with table markers")
    parser.add_argument("--directory", default=headline.DEFAULT_DIRECTORY, help="where headline.json lies")
    parser.add_argument(
        "--check", action="store_true", help="fail when a table is out of date, write nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Update or check the files; status 1 when a check finds one out of date."""
    figures = headline.load(args.directory)
    stale = [path for path in args.files if not tables.update_file(path, figures, check=args.check)]
    for path in stale:
        print(f"{path}: " + ("out of date, run `make readme-tables`" if args.check else "updated"))
    return 1 if stale and args.check else 0
