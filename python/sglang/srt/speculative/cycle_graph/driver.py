"""Putting one captured graph into another, by the CUDA driver's own calls.

PyTorch captures streams but has no call for a child graph. While a stream is being captured, the graph under
construction and the nodes the next one would depend on can be asked for; a child node is added there and becomes
what the next captured launch depends on. Only stable, versioned driver entry points are used, so nothing but the
driver is needed. Source of the method: CUDA driver API, stream capture and graph management.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

_SET_DEPENDENCIES = 1
_ACTIVE = 1


class GraphError(RuntimeError):
    """The driver refused a graph operation."""


@lru_cache(maxsize=1)
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        raise GraphError(f"{call} failed with CUDA driver error {status}")


def add_child(graph: torch.cuda.CUDAGraph, library: Any = None) -> None:
    """Make ``graph`` the next node of the capture on the current stream.

    Args:
        graph: captured with ``keep_graph=True``. It is cloned: both stay usable by themselves, but what the clone
            reads and writes are the same addresses.
        library: the driver; given by tests.

    Raises:
        GraphError: no capture is under way, or the driver refuses.
    """
    cuda = library or _cuda()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status, identity, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    parent, edges, dependencies = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(
        cuda.cuStreamGetCaptureInfo_v3(
            stream,
            ctypes.byref(status),
            ctypes.byref(identity),
            ctypes.byref(parent),
            ctypes.byref(dependencies),
            ctypes.byref(edges),
            ctypes.byref(count),
        ),
        "cuStreamGetCaptureInfo",
    )
    if status.value != _ACTIVE:
        raise GraphError("a child graph needs a capture under way on the current stream")
    node = ctypes.c_void_p()
    child = ctypes.c_void_p(graph.raw_cuda_graph())
    _check(
        cuda.cuGraphAddChildGraphNode(ctypes.byref(node), parent, dependencies, count, child),
        "cuGraphAddChildGraphNode",
    )
    nodes = (ctypes.c_void_p * 1)(node)
    _check(
        cuda.cuStreamUpdateCaptureDependencies_v2(
            stream, nodes, None, ctypes.c_size_t(1), ctypes.c_uint(_SET_DEPENDENCIES)
        ),
        "cuStreamUpdateCaptureDependencies",
    )


class KeptGraph(torch.cuda.CUDAGraph):
    """A graph that can be launched, like any, and put into another one as well."""

    def __new__(cls) -> KeptGraph:
        made: KeptGraph = super().__new__(cls, True)
        return made

    def __init__(self) -> None:
        # The binding reads its argument here, and again above.
        super().__init__(True)  # type: ignore[call-arg]

    def capture_end(self) -> None:
        """Instantiate at once: the first launch of a serving step must not pay for it."""
        super().capture_end()
        self.instantiate()
