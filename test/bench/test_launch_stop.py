"""A bench server that does not come up, or whose start is interrupted, leaves no process behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from sglang.bench_verify.launch import LaunchError, RunningServer, ServerPlan, together
from sglang.verify_demo.process import session_members

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); time.sleep(300)"


class Scripted(RunningServer):
    """Runs a given piece of Python in place of a server."""

    def __init__(self, code: str, log: Path, limit_s: float = 60.0) -> None:
        super().__init__(ServerPlan("scripted", "fork"), log, log.with_suffix(".json"), limit_s)
        self._code = code

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-c", self._code]

    def was_started(self) -> bool:
        """Whether there is a process yet."""
        return getattr(getattr(self, "_server", None), "_process", None) is not None


def left_over(server: RunningServer) -> list[int]:
    return session_members(server._server.pid)


def test_an_interrupt_while_starting_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Scripted(SLEEPER, tmp_path / "log")

    def interrupted() -> bool:
        assert left_over(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(server.client, "healthy", interrupted)
    with pytest.raises(KeyboardInterrupt), server:
        pytest.fail("entered")
    assert not left_over(server)


def test_a_server_that_is_never_healthy_is_stopped(tmp_path: Path) -> None:
    server = Scripted(SLEEPER, tmp_path / "log", limit_s=0.1)
    with pytest.raises(LaunchError, match="scripted not healthy after"), server:
        pytest.fail("entered")
    assert not left_over(server)


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    server = Scripted("raise SystemExit('no such model')", tmp_path / "log")
    with pytest.raises(LaunchError, match=r"(?s)scripted.*status 1.*no such model"), server:
        pytest.fail("entered")


def test_servers_together_are_all_stopped_where_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Scripted(SLEEPER, tmp_path / "good")
    monkeypatch.setattr(good.client, "healthy", lambda: True)
    bad = Scripted("raise SystemExit('no such model')", tmp_path / "bad")
    with pytest.raises(LaunchError, match="no such model"), together([good, bad]):
        pytest.fail("entered")
    assert not left_over(good)


def test_servers_together_are_up_and_then_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Scripted(SLEEPER, tmp_path / name) for name in ("a", "b")]
    for server in servers:
        monkeypatch.setattr(server.client, "healthy", lambda: True)
    with together(servers) as up:
        assert all(left_over(server) for server in up)
    assert not any(left_over(server) for server in servers)


def test_an_interrupt_while_several_start_stops_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is up, one hangs: the interrupt reaches the thread that waits for both, not those that start them."""
    up, hanging = (Scripted(SLEEPER, tmp_path / name, limit_s=600.0) for name in ("up", "hanging"))
    monkeypatch.setattr(up.client, "healthy", lambda: True)
    monkeypatch.setattr(hanging.client, "healthy", lambda: False)

    def interrupted(starts: list[Future[object]]) -> Iterator[Future[object]]:
        yield starts[0]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (hanging.was_started() and left_over(hanging)):
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang.bench_verify.launch.as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt), together([up, hanging]):
        pytest.fail("entered")
    assert not left_over(up) and not left_over(hanging)


def test_a_failing_start_ends_the_others_before_they_are_up(tmp_path: Path) -> None:
    """Otherwise a mistake in one server's arguments is told when the slowest of them is up."""
    hanging = Scripted(SLEEPER, tmp_path / "hanging", limit_s=600.0)
    bad = Scripted("raise SystemExit('no such model')", tmp_path / "bad")
    with pytest.raises(LaunchError, match="no such model"), together([hanging, bad]):
        pytest.fail("entered")
    assert not left_over(hanging)
