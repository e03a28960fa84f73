"""A port for a server that binds it a minute later: nobody else is given it meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from sglang.verify_demo import process


def with_range(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the kernel's own range be this one."""
    (folder / "range").write_text(text, encoding="utf-8")
    monkeypatch.setattr(process, "_PORT_RANGE", folder / "range")


@pytest.mark.parametrize(("text", "below"), [("20000\t60999\n", 20000), ("no numbers", 32768), ("", 32768)])
def test_a_port_lies_below_what_the_kernel_gives(
    text: str, below: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_range(tmp_path, monkeypatch, text)
    found = {process.free_port() for _ in range(50)}
    assert all(10000 <= port < below for port in found)
    assert len(found) > 40  # two that start a server at the same time do not get the same


def test_where_the_range_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PORT_RANGE", tmp_path / "none")
    assert 10000 <= process.free_port() < 32768


def test_a_range_that_leaves_none_gives_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_range(tmp_path, monkeypatch, "1024\t65535\n")
    assert process.free_port() > 1023


def test_a_port_in_use_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", process.free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(process, "_LEAST_PORT", port)
        with_range(tmp_path, monkeypatch, f"{port + 1}\t65535\n")  # leaves this one alone
        assert process.free_port() != port
