"""The environment of this process as its C library holds it, and what of it may be shown."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Values that could hold a path of one machine or a secret are reported as set, not as what they are.
HIDDEN = (
    "PATH",
    "DIR",
    "FILE",
    "HOME",
    "KEY",
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "BASELINE",
    "WHEELS",
    "CACHE",
    "TABLE",
)
SET = "(set)"
# What reaches a rank's communication, its allocator or our own code.
PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "SGLANG_FORK_",
    "SGLANG_SPEC_",
)


def native_environment(prefixes: str | tuple[str, ...] = "NCCL_") -> dict[str, str]:
    """Variables as the C library of this process holds them, which is where NCCL reads them.

    ``os.environ`` is a copy made at start; a library that called ``putenv`` or a launcher that
    replaced the mapping leaves the two different, and then only this reading is right.
    """
    try:
        entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    except (ValueError, OSError):
        return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    found: dict[str, str] = {}
    index = 0
    while entries and (entry := entries[index]) is not None:
        name, _, value = entry.decode("utf-8", "replace").partition("=")
        if name.startswith(prefixes):
            found[name] = value
        index += 1
    return dict(sorted(found.items()))


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """The same variables in name order, values that may name a place or a secret replaced by ``(set)``."""
    return {
        name: SET if any(word in name for word in HIDDEN) else value
        for name, value in sorted(variables.items())
    }
