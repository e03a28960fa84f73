"""What a captured CUDA graph consists of: the time of a step is that of its kernels and of whatever is between them."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

#: CUgraphNodeType, as far as a reduction may leave such nodes behind.
KINDS = {
    0: "kernel",
    1: "copy",
    2: "memset",
    3: "host call",
    4: "graph",
    5: "empty",
    6: "event wait",
    7: "event record",
}


def count(graph: int, driver: Any = None) -> dict[str, int]:
    """Nodes of a graph by kind.

    Args:
        graph: address of a ``CUgraph``.
        driver: libcuda; None loads it.

    Raises:
        OSError: there is no driver, or it refused.
    """
    library = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    number = ctypes.c_size_t()
    _ask(library.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(number)))
    nodes = (ctypes.c_void_p * number.value)()
    _ask(library.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(number)))
    found: Counter[str] = Counter()
    for node in nodes[: number.value]:
        kind = ctypes.c_int()
        _ask(library.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        found[KINDS.get(kind.value, f"kind {kind.value}")] += 1
    return dict(found)


def _ask(status: int) -> None:
    if status:
        raise OSError(f"the driver answered {status}")
