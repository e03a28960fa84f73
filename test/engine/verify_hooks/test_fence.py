"""The scheduler's fence moves behind the replay once a graph reads the request table, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from sglang.srt.layers.attention.verify import binding, fence


class Stream:
    """Notes the order of replays and event records."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def runner(self) -> Any:
        log = self.log

        class Event:
            def record(self) -> None:
                log.append("event")

        return SimpleNamespace(
            model_runner=SimpleNamespace(war_fastpath_read_done_event=None),
            device_module=SimpleNamespace(Event=Event),
        )


def execute(runner: Any, log: list[str], *, publish: bool) -> str:
    """What upstream's runner does: publish the event, then replay."""
    if publish:
        event = runner.device_module.Event()
        event.record()
        runner.model_runner.war_fastpath_read_done_event = event
    log.append("replay")
    return "logits"


@pytest.mark.parametrize(
    ("reads", "publish", "expected"),
    [
        (True, True, ["event", "replay", "event"]),
        (False, True, ["event", "replay"]),
        (True, False, ["replay"]),
    ],
)
def test_the_event_is_recorded_behind_the_replay(
    reads: bool, publish: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_graphs_read_table", reads)
    stream = Stream()
    runner = stream.runner()
    out = fence.after_replay(lambda r: execute(r, stream.log, publish=publish), runner)
    assert out == "logits"
    assert stream.log == expected
    assert (runner.model_runner.war_fastpath_read_done_event is not None) == publish
