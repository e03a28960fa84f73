"""File descriptors between processes: each of three ranks reads what the others wrote into theirs."""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import tempfile
import threading
from typing import Any

import pytest
from sglang.srt.distributed.one_shot.descriptors import exchange_descriptors

RANKS = 3


def worker(rank: int, inboxes: list[Any], results: Any) -> None:
    def gather(value: Any) -> list[Any]:
        for inbox in inboxes:
            inbox.put((rank, value))
        return [value for _, value in sorted(inboxes[rank].get(timeout=120) for _ in range(RANKS))]

    with tempfile.TemporaryFile() as file:
        file.write(f"of rank {rank}".encode())
        file.flush()
        with exchange_descriptors(gather, rank, RANKS, os.dup(file.fileno())) as received:
            texts = {other: os.pread(fd, 100, 0).decode() for other, fd in received.items()}
            fds = list(received.values())
        gather("done")
    still_open = 0
    for fd in fds:
        try:
            os.fstat(fd)
            still_open += 1
        except OSError:
            pass
    results.put((rank, texts, still_open))


def test_every_rank_gets_every_other_ranks_file() -> None:
    context: Any = multiprocessing.get_context("fork")
    inboxes, results = [context.Queue() for _ in range(RANKS)], context.Queue()
    processes = [context.Process(target=worker, args=(rank, inboxes, results)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        for rank, texts, still_open in sorted(results.get(timeout=180) for _ in range(RANKS)):
            assert texts == {other: f"of rank {other}" for other in range(RANKS) if other != rank}
            assert still_open == 0
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_nothing_to_give_passes_nothing() -> None:
    with exchange_descriptors(lambda value: [value], 0, 3, None) as received:
        assert received == {}


def test_a_rank_without_sockets_tells_the_others_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def refuse(*_: Any) -> Any:
        raise OSError("no Unix sockets in this sandbox")

    monkeypatch.setattr("sglang.srt.distributed.one_shot.descriptors.socket.socket", refuse)
    fd = os.open(os.devnull, os.O_RDONLY)
    with (
        pytest.raises(OSError, match="rank 0 has no socket: no Unix sockets in this sandbox"),
        exchange_descriptors(lambda value: told.append(value) or [value, ("name", "")], 0, 2, fd),
    ):
        pass
    assert len(told) == 1  # the exchange took place all the same: the other rank is in it


def test_a_stranger_takes_nobodys_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's connection gets nothing; the rank that comes after it is still served."""
    from sglang.srt.distributed.one_shot import descriptors

    uids = iter([os.getuid() + 1, os.getuid()])
    real = struct.unpack
    monkeypatch.setattr(
        descriptors.struct,
        "unpack",
        lambda form, data: (0, next(uids), 0) if form == "3i" else real(form, data),
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, tempfile.TemporaryFile() as file:
        name = f"\0test-{os.getpid()}-stranger"
        server.bind(name)
        server.listen(2)
        giver = threading.Thread(target=descriptors._give, args=(server, 1, file.fileno()), daemon=True)
        giver.start()
        with pytest.raises(OSError, match="no file descriptor"):
            descriptors._take(name, 0)
        os.close(descriptors._take(name, 0))
        giver.join(10)
        assert not giver.is_alive()


def test_a_silent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.distributed.one_shot.descriptors.LIMIT_S", 0.3)
    fd = os.open(os.devnull, os.O_RDONLY)
    with (
        pytest.raises(OSError, match="file descriptor of rank 1"),
        exchange_descriptors(lambda value: [value, ("\0nobody-listens-here", "")], 0, 2, fd),
    ):
        pass
    with pytest.raises(OSError):
        os.fstat(fd)
