"""When may the scheduler write the request table again? After the graph that reads it, not before.

Upstream lets its scheduler go on as soon as a forward pass has copied what it needs out of the request table, just
before the graph is replayed: its kernels read the copy. Ours read the table inside the graph, so the event that the
scheduler's stream waits for is recorded again behind the replay. What the scheduler does on its stream in that time is
a handful of small copies, which then run between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.verify.binding import graphs_read_table

EVENT = "war_fastpath_read_done_event"


def after_replay(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``execute`` of the runners that publish the event (decode; draft extend)."""
    result = original(runner, *args, **kwargs)
    model_runner = runner.model_runner
    if graphs_read_table() and getattr(model_runner, EVENT) is not None:
        event = runner.device_module.Event()
        event.record()
        setattr(model_runner, EVENT, event)
    return result
