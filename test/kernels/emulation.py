"""``fused.cu`` on this CPU: compiled against ``emulated/device.h``, one fiber a thread, and put in the driver's place."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.layers.attention.verify import fused_build
from sglang.srt.layers.attention.verify.fused_build import Variant
from sglang.srt.layers.attention.verify.fused_driver import Params

HERE = Path(__file__).parent / "emulated"
COMPILER = shutil.which("g++") or shutil.which("clang++")
LIMIT_S = 600


@functools.cache
def library(variant: Variant, old: str = "", new: str = "") -> ctypes.CDLL:
    """The kernel as a library of this machine; a control breaks it by writing ``new`` for ``old``, which occurs once."""
    assert COMPILER is not None
    where = Path(tempfile.mkdtemp(prefix="fused-emulated-"))
    found = 0
    for path in (fused_build.SOURCE, *fused_build.HEADERS):
        text = path.read_text(encoding="utf-8")
        found += text.count(old) if old else 0
        (where / path.name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    assert found == bool(old), (old, found)
    target = where / "fused.so"
    options = [o for o in variant.options("none") if o.startswith("-D")]
    subprocess.run(
        [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", *options, f"-I{where}", f"-I{HERE}",
         "-o", str(target), str(HERE / "run.cpp")],
        check=True, timeout=LIMIT_S,
    )  # fmt: skip
    return ctypes.CDLL(str(target))


class EmulatedKernel:
    """Stands in for ``FusedKernel``: ``previous`` is what the kernel before the next launch still has to do."""

    previous: Callable[[], None] | None = None

    def __init__(self, variant: Variant, old: str = "", new: str = "") -> None:
        self.library = library(variant, old, new)

    def launch(self, params: Params, blocks: int, stream: int, early: bool = True) -> None:
        """Run the grid to its end."""
        kind = ctypes.CFUNCTYPE(None)
        callback: Any = kind(self.previous) if self.previous is not None else kind()
        self.library.launch(ctypes.byref(params), blocks, callback)
