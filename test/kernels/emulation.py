"""``fused.cu`` and ``warpgroup.cu`` on this CPU: compiled against ``emulated/``, one fiber a thread, in the driver's place."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.layers.attention.verify.fused_build import Variant, WarpgroupVariant
from sglang.srt.layers.attention.verify.fused_driver import Params

HERE = Path(__file__).parent / "emulated"
COMPILER = shutil.which("g++") or shutil.which("clang++")
LIMIT_S = 600
_MAIN = {"fused": "run.cpp", "warpgroup": "run_warpgroup.cpp"}


@functools.cache
def library(variant: Variant | WarpgroupVariant, old: str = "", new: str = "") -> ctypes.CDLL:
    """The kernel as a library of this machine; a control breaks it by writing ``new`` for ``old``, which occurs once."""
    assert COMPILER is not None
    where = Path(tempfile.mkdtemp(prefix="emulated-"))
    found = 0
    for path in variant.files:
        text = path.read_text(encoding="utf-8")
        found += text.count(old) if old else 0
        (where / path.name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    if found != bool(old):
        # No AssertionError: that is what a control waits for.
        raise LookupError(f"{found} places to break: {old!r}")
    target = where / "kernel.so"
    options = [o for o in variant.options("none") if o.startswith("-D")]
    if COMPILER.endswith("g++") and not COMPILER.endswith("clang++"):
        # Its inline variables would be one for all libraries of the process.
        options.append("-fno-gnu-unique")
    subprocess.run(
        [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", *options, f"-I{where}", f"-I{HERE}",
         "-o", str(target), str(HERE / _MAIN[variant.files[0].stem])],
        check=True, timeout=LIMIT_S,
    )  # fmt: skip
    loaded = ctypes.CDLL(str(target))
    loaded.launch.restype = ctypes.c_char_p
    if getattr(variant, "listed", False):
        loaded.lay_out.restype = ctypes.c_char_p
    return loaded


class DeviceError(AssertionError):
    """The emulated device stopped the launch: a deadlock, or something that no device may be asked to do."""


class _Emulated:
    """``previous`` is what the kernel before the next launch still has to do."""

    previous: Callable[[], None] | None = None

    def __init__(self, variant: Variant | WarpgroupVariant, old: str = "", new: str = "") -> None:
        self.library = library(variant, old, new)

    def _run(self, *args: Any) -> None:
        kind = ctypes.CFUNCTYPE(None)
        callback: Any = kind(self.previous) if self.previous is not None else kind()
        message = self.library.launch(*args, callback)
        if message:
            raise DeviceError(message.decode())


class EmulatedKernel(_Emulated):
    """Stands in for ``FusedKernel``."""

    def launch(self, params: Params, blocks: int, stream: int) -> None:
        """Run the grid to its end."""
        self._run(ctypes.byref(params), blocks)


class EmulatedWarpgroup(_Emulated):
    """Stands in for ``WarpgroupKernels``."""

    before_list: Callable[[], None] | None = None
    """What the kernel in front of the next work list still has to do."""

    def __init__(self, variant: WarpgroupVariant, old: str = "", new: str = "") -> None:
        super().__init__(variant, old, new)
        self.variant = variant
        self.lists = 0

    def launch(self, split: Params, merge: Params, items: int, batch: int, stream: int) -> None:
        """Run both grids to their end."""
        columns = self.variant.merge_columns(batch)
        self._run(ctypes.byref(split), ctypes.byref(merge), items, columns, batch)

    def lay_out(self, params: Params, items: int, stream: int) -> None:
        """Write a work list, which the next split sees once it waits."""
        self.lists += 1
        kind = ctypes.CFUNCTYPE(None)
        callback: Any = kind(self.before_list) if self.before_list is not None else kind()
        message = self.library.lay_out(ctypes.byref(params), items, callback)
        if message:
            raise DeviceError(message.decode())
