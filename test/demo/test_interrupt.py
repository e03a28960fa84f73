"""An interrupt that comes while the server's process is being made: it is neither lost nor does it leave the process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.verify_demo import process
from sglang.verify_demo.process import Server, session_members


@pytest.fixture
def _heard() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
def test_an_interrupt_within_the_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        os.kill(os.getppid(), signal.SIGINT)  # runs in the child before its exec, for which the parent waits

    monkeypatch.setattr(process, "_die_with_parent", interrupt)
    server = Server(
        [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", watch_memory=False
    )
    with pytest.raises(KeyboardInterrupt), server:
        pytest.fail("entered")
    assert session_members(server.pid) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_server_is_entered_and_left_as_ever(tmp_path: Path) -> None:
    with Server([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log") as server:
        assert session_members(server.pid)
    assert session_members(server.pid) == []
