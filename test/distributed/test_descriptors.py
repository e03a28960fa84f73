"""File descriptors between processes: each of three ranks reads what the others wrote into theirs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Any

import pytest
from sglang.srt.distributed.one_shot.descriptors import exchange_descriptors

RANKS = 3


def worker(rank: int, inboxes: list[Any], results: Any) -> None:
    def gather(value: Any) -> list[Any]:
        for inbox in inboxes:
            inbox.put((rank, value))
        return [value for _, value in sorted(inboxes[rank].get(timeout=30) for _ in range(RANKS))]

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
        for rank, texts, still_open in sorted(results.get(timeout=60) for _ in range(RANKS)):
            assert texts == {other: f"of rank {other}" for other in range(RANKS) if other != rank}
            assert still_open == 0
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_nothing_to_give_passes_nothing() -> None:
    with exchange_descriptors(lambda value: [value], 0, 3, None) as received:
        assert received == {}


def test_a_silent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.distributed.one_shot.descriptors.LIMIT_S", 0.3)
    fd = os.open(os.devnull, os.O_RDONLY)
    with (
        pytest.raises(OSError, match="file descriptor of rank 1"),
        exchange_descriptors(lambda value: [value, "\0nobody-listens-here"], 0, 2, fd),
    ):
        pass
    with pytest.raises(OSError):
        os.fstat(fd)
