"""Loads machine code of ``fused.cu`` and ``warpgroup.cu`` into a device and launches it, through the CUDA driver's C interface.

Three driver calls: load, raise the limit on shared memory, launch with an attribute. Everything else of CUDA stays
PyTorch's, its context included.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify.fused_build import (
    WARPGROUP_LIST_THREADS,
    WARPGROUP_MERGE_THREADS,
    WARPGROUP_THREADS,
    BuildError,
    Variant,
    WarpgroupVariant,
    deepest,
    machine_code,
)

THREADS = 384
PATH, WARPGROUP_PATH = "verify-fused", "verify-warpgroup"

_MAX_DYNAMIC_SHARED = 8
_PREFERRED_SHARED = 9
_PROGRAMMATIC_SERIALIZATION = 6


class Params(ctypes.Structure):
    """Arguments of the kernel, field for field as in ``fused_work.cuh``. Pointers are device addresses."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "latent", "out", "lse", "packets", "headers")),
        *((name, ctypes.c_void_p) for name in ("lens", "requests", "slots", "indptr", "list")),
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


class Loaded:
    """Machine code in the current CUDA context."""

    def __init__(self, variant: Variant | WarpgroupVariant, arch: str) -> None:
        """Compile or fetch, and load. Raises BuildError."""
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise BuildError("no CUDA driver library") from None
        code = machine_code(variant, arch)
        self._module = ctypes.c_void_p()
        _check(self.library.cuModuleLoadData(ctypes.byref(self._module), code), "the kernel's machine code")
        self._early = (_Attribute * 1)()
        self._early[0].id = _PROGRAMMATIC_SERIALIZATION
        self._early[0].value[0] = 1

    def entry(self, name: bytes, shared: int) -> ctypes.c_void_p:
        """The kernel ``name`` with room for ``shared`` bytes of dynamic shared memory. Raises BuildError."""
        function = ctypes.c_void_p()
        _check(
            self.library.cuModuleGetFunction(ctypes.byref(function), self._module, name), "its entry point"
        )
        status = self.library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared)
        _check(status, "its shared memory")
        # A multiprocessor must be empty to be divided anew between cache and shared memory: a block that asks for little would
        # keep the next call's away.
        status = self.library.cuFuncSetAttribute(function, _PREFERRED_SHARED, 100)
        _check(status, "its share of the cache")
        return function

    def run(
        self,
        function: ctypes.c_void_p,
        params: Params,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        stream: int,
    ) -> None:
        """Launch on ``stream``; it may start before the kernel in front of it has ended."""
        config = _Config((*grid, 1), (threads, 1, 1), shared, stream, self._early, 1)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        status = self.library.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None)
        if status:
            raise RuntimeError(f"launch of an attention kernel failed with CUDA error {status}")


class FusedKernel:
    """One variant of ``fused.cu`` in the current CUDA context."""

    def __init__(self, variant: Variant, arch: str) -> None:
        """Compile or fetch, and load. Raises BuildError."""
        self._loaded = Loaded(variant, arch)
        self._shared = variant.shared_bytes()
        self._function = self._loaded.entry(b"verify_fused", self._shared)

    def launch(self, params: Params, blocks: int, stream: int) -> None:
        """Launch on ``stream``."""
        self._loaded.run(self._function, params, (blocks, 1), THREADS, self._shared, stream)


class WarpgroupKernels:
    """One variant of ``warpgroup.cu`` in the current CUDA context: split and merge, and the work list if it reads one."""

    def __init__(self, variant: WarpgroupVariant, arch: str) -> None:
        """Compile or fetch, and load. Raises BuildError."""
        self.variant = variant
        self._loaded = Loaded(variant, arch)
        self._split = self._loaded.entry(b"verify_split", variant.shared_bytes())
        self._merge = self._loaded.entry(b"verify_merge", variant.merge_bytes())
        self._list = self._loaded.entry(b"verify_list", 0) if variant.listed else None

    def lay_out(self, params: Params, items: int, stream: int) -> None:
        """Write a work list on ``stream``, in front of the split that has ``FRESH_LIST``."""
        assert self._list is not None
        self._loaded.run(self._list, params, (items, 1), WARPGROUP_LIST_THREADS, 0, stream)

    def launch(self, split: Params, merge: Params, items: int, batch: int, stream: int) -> None:
        """Launch both on ``stream``; their arguments differ in where time stamps go."""
        run, v = self._loaded.run, self.variant
        run(self._split, split, (items, 1), WARPGROUP_THREADS, v.shared_bytes(), stream)
        columns = v.merge_columns(batch)
        run(self._merge, merge, (columns, batch), WARPGROUP_MERGE_THREADS, v.merge_bytes(), stream)


def capture_of(stream: int) -> int | None:
    """Which capture of a graph ``stream`` is in: 0 for none. None, counted as a fallback, if the driver does not say."""
    ask = _capture_info()
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    if ask is None or ask(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    ):
        fallbacks.record(
            WARPGROUP_PATH, "no work list: the driver does not say which graph is being captured"
        )
        return None
    return number.value if status.value else 0


@functools.cache
def _capture_info() -> Any:
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), "cuStreamGetCaptureInfo_v2", None)
    except OSError:
        return None


@functools.cache
def load(variant: Variant | WarpgroupVariant, device: torch.device) -> Any:
    """The kernels of ``variant`` on ``device``, loaded once a process. Raises BuildError."""
    with torch.cuda.device(device):
        # Loading needs PyTorch's context to be current in this thread.
        torch.cuda.current_stream().query()
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
        if isinstance(variant, WarpgroupVariant):
            return WarpgroupKernels(variant, arch)
        return FusedKernel(variant, arch)


def _loads(variant: Variant | WarpgroupVariant, device_index: int, path: str) -> bool:
    """Whether ``variant`` can be built and loaded; if not, counted as a fallback of ``path`` with the reason."""
    try:
        load(variant, torch.device("cuda", device_index))
    except BuildError as error:
        fallbacks.record(path, error.reason, detail=error.detail)
        return False
    return True


@functools.cache
def available(device_index: int) -> bool:
    """Whether the one-launch kernel can be built and loaded on a device; if not, counted as a fallback with the reason."""
    variant = deepest(3, False, False, torch.cuda.get_device_capability(device_index))
    return variant is not None and _loads(variant, device_index, PATH)


@functools.cache
def warpgroup_available(device_index: int) -> bool:
    """The same for the two launches in CUDA C++, asked with the variant of a model's verify, which reads a list."""
    return _loads(WarpgroupVariant(3, False, listed=True), device_index, WARPGROUP_PATH)
