"""Which workspace a launch belongs to: graphs that may lie in flight together never share flags and slots.

Eager launches use ``eager``. A launch that is being captured belongs to the graph of the model being captured:
``target``, or ``draft`` while a draft runner captures. Replays need no look-up: the graph holds its workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

EAGER, TARGET, DRAFT = "eager", "target", "draft"
_graph: ContextVar[str] = ContextVar("one_shot_graph", default=TARGET)


@contextmanager
def graph_of(name: str) -> Iterator[None]:
    """Captured launches inside belong to the workspace ``name``."""
    token = _graph.set(name)
    try:
        yield
    finally:
        _graph.reset(token)


def workspace(device: torch.device) -> str:
    """The workspace of a launch made now on the current stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _graph.get()
    return EAGER
