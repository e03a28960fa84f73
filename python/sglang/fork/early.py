"""Lets the fork's diagnostics run when the rest of the package cannot be imported.

``python -m sglang.fork`` first imports the parent package, which loads torch, transformers and more. A
diagnosis that dies on what it is to diagnose is of no use, so the first line of ``sglang/__init__`` calls
``run_diagnostics``: if the interpreter was started for one of our stdlib-only tools, it runs right there.
"""

from __future__ import annotations

import itertools
import runpy
import sys

TOOLS = ("sglang.fork", "sglang.verify_doctor")


def requested(argv: list[str], original: list[str]) -> str | None:
    """The tool that ``python -m TOOL`` asked for, else None.

    While the interpreter looks for the ``-m`` module, ``sys.argv[0]`` is ``"-m"``; afterwards it is a path.
    """
    if not argv or argv[0] != "-m":
        return None
    # Interpreter options come before -m, the tool's own arguments after its name.
    for flag, name in itertools.pairwise(original):
        if flag == "-m":
            return name if name in TOOLS else None
    return None


def run_diagnostics() -> None:
    """Run the requested tool and leave the interpreter with its exit status; return if none was asked for."""
    tool = requested(sys.argv, list(getattr(sys, "orig_argv", [])))
    if tool is None:
        return
    runpy.run_module(tool, run_name="__main__", alter_sys=True)
    raise SystemExit(0)
