"""Contexts in which upstream's draft and its graph runners work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def as_draft(drafter: Any) -> Iterator[None]:
    """What upstream sets up around every pass and every capture of the draft."""
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )

    with ExitStack() as stack:
        stack.enter_context(drafter.draft_tp_context(drafter.draft_runner.tp_group))
        stack.enter_context(speculative_moe_backend_context())
        stack.enter_context(speculative_moe_a2a_backend_context())
        yield


@contextmanager
def state_stays(backend: Any) -> Iterator[None]:
    """One more graph runner over an attention backend: allocating its buffers again would pull them from under the
    graphs that hold them."""
    backend.init_cuda_graph_state = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del backend.init_cuda_graph_state
