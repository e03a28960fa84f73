"""Topic ``run-stream``: ``stream_interval`` counts tokens, not steps that happen to land on a multiple.

Upstream streams when the output length is 1 modulo the interval. A run jumps over lengths: with interval 3
and runs of 3 that begin at length 2, nothing is streamed until the request ends.
"""

from __future__ import annotations

from typing import Any


def due(stock: bool, request: Any, interval: int) -> bool:
    """Whether the output has passed a length of 1 modulo ``interval`` since the last piece was sent."""
    if stock or interval <= 1:
        return stock
    return passed(request.send_token_offset, len(request.output_ids), interval)


def passed(sent: int, length: int, interval: int) -> bool:
    """Whether some length in ``(sent, length]`` is 1 modulo ``interval`` (above 1)."""
    return (length - 1) // interval > (sent - 1) // interval
