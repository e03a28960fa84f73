"""``python -m sglang.fork [--json]``: base, fork version, and the state of every topic with its reason."""

from __future__ import annotations

import argparse
import json
import os
import sys

from sglang.fork.topics import Report, report


def render(state: Report) -> str:
    """The report as text, one topic a line."""
    if not state.composed:
        return state.line()
    lines = [f"base     sglang {state.base}", f"fork     sglang {state.version}", ""]
    width = max((len(topic.name) for topic in state.topics), default=0)
    for topic in state.topics:
        lines.append(f"{topic.name:<{width}}  {topic.state:<10}  {topic.reason}")
        lines.append(f"{'':<{width}}  why: {topic.why}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the report; status 0, or 1 where the tree was not composed."""
    parser = argparse.ArgumentParser(prog="python -m sglang.fork", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable form")
    options = parser.parse_args(argv)
    state = report()
    try:
        print(json.dumps(state.as_dict(), indent=2) if options.json else render(state), flush=True)
    except BrokenPipeError:
        # A reader like `head` has enough; without this the interpreter complains when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if state.composed else 1


if __name__ == "__main__":
    sys.exit(main())
