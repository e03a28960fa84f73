"""Loads ``fused.cu``'s machine code into a device and launches it, through the CUDA driver's C interface.

Three driver calls: load, raise the limit on shared memory, launch with an attribute. Everything else of CUDA stays
PyTorch's, its context included.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify.fused_build import BuildError, Variant, deepest, machine_code

THREADS = 384
ENTRY = b"verify_fused"
PATH = "verify-fused"

_MAX_DYNAMIC_SHARED = 8
_PROGRAMMATIC_SERIALIZATION = 6


class Params(ctypes.Structure):
    """Arguments of the kernel, field for field as in ``fused.cu``. Pointers are device addresses."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "latent", "out", "lse", "packets", "headers")),
        *((name, ctypes.c_void_p) for name in ("lens", "requests", "slots", "indptr")),
        *((f"stride_{name}", ctypes.c_longlong) for name in ("table", "token", "head", "slot")),
        ("score_scale", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("batch", "target", "min_keys", "tokens", "heads", "flags")),
        ("header_width", ctypes.c_int),
    )


class TracedParams(Params):
    """Arguments of a kernel built to leave time stamps."""

    _fields_ = (("trace", ctypes.c_void_p),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _check(status: int, what: str) -> None:
    if status:
        raise BuildError(f"the CUDA driver refuses {what}", f"error {status}")


class FusedKernel:
    """One variant in the current CUDA context."""

    def __init__(self, variant: Variant, arch: str) -> None:
        """Compile or fetch, and load. Raises BuildError."""
        self.variant = variant
        self.shared = variant.shared_bytes()
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise BuildError("no CUDA driver library") from None
        code = machine_code(variant, arch)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self.library.cuModuleLoadData(ctypes.byref(module), code), "the kernel's machine code")
        _check(
            self.library.cuModuleGetFunction(ctypes.byref(self._function), module, ENTRY), "its entry point"
        )
        status = self.library.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, self.shared)
        _check(status, "its shared memory")
        self._early = (_Attribute * 1)()
        self._early[0].id = _PROGRAMMATIC_SERIALIZATION
        self._early[0].value[0] = 1

    def launch(self, params: Params, blocks: int, stream: int, early: bool = True) -> None:
        """Launch on ``stream``; ``early`` lets it start before the kernel in front of it has ended."""
        config = _Config((blocks, 1, 1), (THREADS, 1, 1), self.shared, stream, self._early, 1 if early else 0)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        status = self.library.cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None)
        if status:
            raise RuntimeError(f"launch of the fused attention kernel failed with CUDA error {status}")


@functools.cache
def load(variant: Variant, device: torch.device) -> Any:
    """The kernel on ``device``, loaded once a process. Raises BuildError."""
    with torch.cuda.device(device):
        # Loading needs PyTorch's context to be current in this thread.
        torch.cuda.current_stream().query()
        major, minor = torch.cuda.get_device_capability(device)
        return FusedKernel(variant, f"sm_{major}{minor}a")


@functools.cache
def available(device_index: int) -> bool:
    """Whether the kernel can be built and loaded on a device; if not, counted as a fallback with the reason."""
    variant = deepest(3, False, False, torch.cuda.get_device_capability(device_index))
    if variant is None:
        return False
    try:
        load(variant, torch.device("cuda", device_index))
    except BuildError as error:
        fallbacks.record(PATH, error.reason, detail=error.detail)
        return False
    return True
