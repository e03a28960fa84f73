"""Port and memory."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from sglang.srt.speculative.arguments import ArgumentFault, machine

GIB = machine.GIB


def test_port_free_and_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ArgumentFault, match=f"--port {port} .*another process listens") as caught:
            machine.check_port("127.0.0.1", port)
        assert caught.value.code == "port-taken"
    machine.check_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [0, -1, 65536, 10**6])
def test_port_out_of_range(port: int) -> None:
    with pytest.raises(ArgumentFault, match="from 1 to 65535"):
        machine.check_port("127.0.0.1", port)


def test_unknown_host() -> None:
    with pytest.raises(ArgumentFault, match="host is unknown"):
        machine.check_port("no.such.host.invalid", 30000)


def test_memory() -> None:
    machine.check_memory(10 * GIB, 10 * GIB, place="one GPU", path="m")
    machine.check_memory(10 * GIB, None, place="one GPU", path="m")
    machine.check_memory(80 * GIB, 10 * GIB, place="one GPU", path="m", ranks=8)
    with pytest.raises(ArgumentFault, match=r"10.25 GiB .* on each of 8 ranks, but one GPU has 10.00 GiB"):
        machine.check_memory(82 * GIB, 10 * GIB, place="one GPU", path="m", ranks=8)
    with pytest.raises(ArgumentFault, match=r"20\.00 GiB"):
        machine.check_memory(10 * GIB, 10 * GIB, place="this machine", path="m", widening=2.0)


def test_available_memory_is_the_least_of_host_and_container(tmp_path: Path) -> None:
    meminfo, limit, used = tmp_path / "meminfo", tmp_path / "max", tmp_path / "current"
    assert machine.available_bytes(meminfo, limit, used) is None
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    50 kB\nHugePages_Total:       3\n")
    assert machine.available_bytes(meminfo, limit, used) == 50 * 1024
    limit.write_text("max\n")
    used.write_text("0\n")
    assert machine.available_bytes(meminfo, limit, used) == 50 * 1024
    limit.write_text("30000\n")
    used.write_text("10000\n")
    assert machine.available_bytes(meminfo, limit, used) == 20000


@pytest.mark.parametrize(
    ("answer", "expected"), [(1024.0, 1 << 30), (None, None), (OSError("no tool"), None)]
)
def test_upstream_is_asked_once_for_the_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, answer: float | OSError | None, expected: int | None
) -> None:
    asked: list[str] = []

    def ask(device: str) -> float | None:
        asked.append(device)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("sglang.srt.utils.get_device_memory_capacity", ask)
    assert [machine.device_bytes("cuda"), machine.device_bytes("cuda")] == [expected] * 2
    assert asked == ["cuda"]
    # Another device is another question, and so is another way to ask.
    machine.device_bytes("xpu")
    assert asked == ["cuda", "xpu"]
    monkeypatch.setattr("sglang.srt.utils.get_device_memory_capacity", lambda _: 2.0)
    assert machine.device_bytes("cuda") == 2 << 20
