"""The compiled library through ctypes: the structures of ``csrc/call.h`` and checked calls."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from sglang.srt.distributed.one_shot.errors import NotBuilt, OneShotError
from sglang.srt.distributed.one_shot.protocol import Variant

ABI = 3
MAX_RANKS = 8
DRIVER_ERROR = 100_000  # added to error codes of the driver API
HANDLE_BYTES = 64

VARIANTS = {Variant.ONE_SHOT: 0, Variant.TWO_STAGE: 1, Variant.PACKETS: 2}
WEAKEN_ONE_BUFFER, WEAKEN_FLAG_FIRST, WEAKEN_DELAY_READ = 1, 2, 4
WEAKEN_TORN, WEAKEN_ANY_EPOCH, WEAKEN_DELAY_PUSH = 8, 16, 32


class Control(Structure):
    """Words in host memory that the device sees; ``abort`` is ours, the rest is the kernel's."""

    _fields_ = tuple(
        (name, c_uint32) for name in ("abort", "code", "peer", "channel", "stage", "epoch", "seen", "unused")
    )


class Layout(Structure):
    """Sections of one rank's workspace, in bytes from its start."""

    _fields_ = [
        ("flags", c_int64),
        ("epochs", c_int64),
        ("poison", c_int64),
        ("slots", c_int64),
        ("packets", c_int64),
        ("bytes", c_int64),
        ("channels", c_int32),
        ("capacity", c_int32),
        ("packet_capacity", c_int32),
        ("unused", c_int32),
    ]


class Call(Structure):
    """One launch."""

    _fields_ = [
        ("base", c_uint64 * MAX_RANKS),
        ("control", c_uint64),
        ("x", c_uint64),
        ("residual", c_uint64),
        ("weight", c_uint64),
        ("out", c_uint64),
        ("residual_out", c_uint64),
        ("limit_ns", c_uint64),
        ("layout", Layout),
        ("rank", c_int32),
        ("ranks", c_int32),
        ("members", c_uint32),
        ("first_channel", c_int32),
        ("max_blocks", c_int32),
        ("rows", c_int32),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("fused", c_int32),
        ("variant", c_int32),
        ("shape", c_int32),
        ("dependent_launch", c_int32),
        ("eps", c_float),
        ("weaken", c_uint32),
        ("delay_ns", c_uint64),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "layout": (c_int32, c_int32, c_int32, c_int32, c_int32, POINTER(Layout)),
    "load": (c_int32,),
    "geometry": (POINTER(Call), POINTER(c_int32)),
    "launch": (POINTER(Call), c_void_p),
    "alloc": (c_int32, c_uint64, POINTER(c_uint64)),
    "free": (c_int32, c_uint64),
    "alloc_control": (c_int32, c_uint64, POINTER(c_uint64), POINTER(c_uint64)),
    "free_control": (c_uint64,),
    "ipc_export": (c_int32, c_uint64, c_char_p),
    "ipc_open": (c_int32, c_char_p, POINTER(c_uint64)),
    "ipc_close": (c_int32, c_uint64),
    "vmm_create": (c_int32, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_int32)),
    "vmm_open": (c_int32, c_int32, c_uint64, POINTER(c_uint64)),
    "vmm_close": (c_int32, c_uint64, c_uint64),
    "read": (c_int32, c_uint64, c_void_p, c_uint64),
}


class Library:
    """A loaded library. ``call(name, ...)`` raises OneShotError with CUDA's own words."""

    def __init__(self, path: Path) -> None:
        """Raises NotBuilt: it does not load, or is of another version of these structures."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotBuilt(f"{path} does not load: {error}") from error
        sizes = [c_int32() for _ in range(3)]
        try:
            abi = self._library.one_shot_abi()
            self._library.one_shot_sizes(*(byref(size) for size in sizes))
            self._error = self._library.one_shot_error
            self._functions = {name: self._library[f"one_shot_{name}"] for name in _SIGNATURES}
        except AttributeError as error:
            raise NotBuilt(f"{path} is not a library of these kernels: {error}") from error
        found = (abi, *(size.value for size in sizes))
        wanted = (ABI, *(ctypes.sizeof(kind) for kind in (Call, Layout, Control)))
        if found != wanted:
            raise NotBuilt(
                f"{path} has interface {found}, {wanted} is needed: remove it, it is compiled anew"
            )
        self._error.restype = c_char_p
        for name, function in self._functions.items():
            function.argtypes = _SIGNATURES[name]
            function.restype = c_int32

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``one_shot_<name>``. Raises OneShotError if it returns an error."""
        code = self._functions[name](*arguments)
        if code:
            raise OneShotError(f"one_shot_{name}: {self.words(code)}")

    def words(self, code: int) -> str:
        """What an error code means."""
        if code >= DRIVER_ERROR:
            return f"driver error {code - DRIVER_ERROR}"
        return f"{self._error(code).decode()} ({code})"

    def layout(self, rows: int, hidden: int, max_blocks: int, ranks: int, pairs: bool) -> Layout:
        """Sections of a workspace of that room."""
        result = Layout()
        self.call("layout", rows, hidden, max_blocks, ranks, int(pairs), byref(result))
        return result

    def geometry(self, call: Call) -> tuple[int, ...]:
        """(CTAs, threads of each, CTAs a cluster, turns) of a launch. Raises OneShotError if it does not fit."""
        result = (c_int32 * 4)()
        self.call("geometry", byref(call), result)
        return tuple(result)

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function whose last parameter receives a 64-bit number, and return it."""
        result = c_uint64()
        self.call(name, *arguments, byref(result))
        return result.value

    def read(self, device: int, address: int, size: int) -> bytes:
        """Device memory of this process; waits for the device's default stream."""
        host = ctypes.create_string_buffer(size)
        self.call("read", device, address, host, size)
        return host.raw
