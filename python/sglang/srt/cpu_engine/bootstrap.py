"""The first thing that happens when `sglang` is imported; standard library only."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from sglang.srt.cpu_engine import portable
from sglang.srt.cpu_engine.detect import find_accelerator

__all__ = ["ENGINE_VARIABLE", "launched_as_server", "prepare"]

#: Upstream's own switch. Its modules read it while they are imported.
ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"


def launched_as_server(argv: list[str], original: list[str]) -> bool:
    """Return whether this interpreter is upstream's server or one of its processes.

    That is `-m sglang.launch_server`, `sglang serve`, or a child that multiprocessing spawned.
    """
    if "--multiprocessing-fork" in argv or "--multiprocessing-fork" in original:
        return True
    for flag, name in itertools.pairwise(original):
        if flag == "-m":
            return name == "sglang.launch_server"
    return bool(argv) and Path(argv[0]).name == "sglang"


def prepare() -> None:
    """Choose the CPU engine where no accelerator is found and the user has not decided.

    `SGLANG_USE_CPU_ENGINE` set by the user, to whatever value, is left alone. Where it ends up on and there is no
    accelerator, the portable ops stand ready behind the name `sgl_kernel`.
    """
    if sys.platform != "linux":
        return
    chosen = os.environ.get(ENGINE_VARIABLE)
    if chosen not in (None, "1") or find_accelerator().found:
        return
    os.environ[ENGINE_VARIABLE] = "1"
    if launched_as_server(sys.argv, list(getattr(sys, "orig_argv", []))):
        # Images that set PYTHONDONTWRITEBYTECODE save a few MB and pay with a minute at every start. A spawned
        # process gets the setting as an interpreter flag, so it has to be undone in each.
        sys.dont_write_bytecode = False
    portable.install()
