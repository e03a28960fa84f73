"""Agreeing on how buffers are shared, with a library that has no device behind it: three ranks, gloo, real descriptors."""

from __future__ import annotations

import os
import tempfile
from ctypes import c_int32, c_uint64
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from sglang.srt.distributed.one_shot import buffers
from sglang.srt.distributed.one_shot.buffers import Method
from sglang.srt.distributed.one_shot.errors import OneShotError, SharingFailed

RANKS = 3
GRAIN = 4096


class FakeLibrary:
    """Hands out numbers as addresses; fails where it is told to: {function: ranks}."""

    def __init__(self, rank: int, failing: dict[str, list[int]]) -> None:
        self.rank, self.failing = rank, failing
        self.open: list[int] = []
        self.seen: list[str] = []

    def _fail(self, name: str) -> None:
        if self.rank in self.failing.get(name, []):
            raise OneShotError(f"one_shot_{name}: refused")

    def number(self, name: str, device: int, *arguments: Any) -> int:
        self._fail(name)
        if name == "ipc_open":
            address = 1000 + int.from_bytes(arguments[0][:4], "little")
        elif name == "vmm_open":
            self.seen.append(os.pread(arguments[0], 100, 0).decode())
            address = 5000 + len(self.seen)
        else:
            address = 100 + self.rank
        self.open.append(address)
        return address

    def call(self, name: str, *arguments: Any) -> None:
        self._fail(name)
        if name == "ipc_export":
            arguments[2].raw = arguments[1].to_bytes(4, "little") + bytes(60)
        elif name == "vmm_create":
            room, own, descriptor = (argument._obj for argument in arguments[1:])
            assert (
                isinstance(room, c_uint64) and isinstance(own, c_uint64) and isinstance(descriptor, c_int32)
            )
            room.value = (room.value + GRAIN - 1) // GRAIN * GRAIN
            own.value = 200 + self.rank
            file = tempfile.TemporaryFile()  # noqa: SIM115
            file.write(f"rank {self.rank}".encode())
            file.flush()
            descriptor.value = os.dup(file.fileno())
            self.open.append(own.value)
        elif name in ("free", "ipc_close", "vmm_close"):
            self.open.remove(arguments[1])


def worker(rank: int, store: str, failing: dict[str, list[int]], machines: list[str], results: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    library = FakeLibrary(rank, failing)
    buffers._machine = lambda: machines[rank]  # type: ignore[assignment]
    answer: Any
    try:
        shared = buffers.share(library, group, 0, 5000, None)  # type: ignore[arg-type]
        answer = (shared.method.name, shared.size, shared.pointers, library.seen)
        shared.close()
    except SharingFailed as error:
        answer = str(error)
    results.put((rank, answer, library.open))
    dist.barrier()
    dist.destroy_process_group()


def share(
    tmp_path: Path, failing: dict[str, list[int]], machines: tuple[str, ...] = ("a", "a", "a")
) -> list[Any]:
    """What each rank got; nothing may stay open."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (str(tmp_path / "store"), failing, list(machines), results)
    processes = [context.Process(target=worker, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        answers = sorted(results.get(timeout=240) for _ in range(RANKS))
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert [left for _, _, left in answers] == [[], [], []]
    return [answer for _, answer, _ in answers]


def test_legacy_handles_where_every_rank_has_them(tmp_path: Path) -> None:
    answers = share(tmp_path, {})
    for rank, (method, size, pointers, _) in enumerate(answers):
        assert (method, size) == (Method.IPC.name, 5000)
        assert pointers == tuple(100 + other if other == rank else 1100 + other for other in range(RANKS))


@pytest.mark.parametrize("function", ["alloc", "ipc_export", "ipc_open"])
def test_all_take_descriptors_if_one_rank_lacks_handles(tmp_path: Path, function: str) -> None:
    for rank, (method, size, pointers, seen) in enumerate(share(tmp_path, {function: [1]})):
        assert (method, size) == (Method.FILE_DESCRIPTORS.name, 8192)
        assert pointers[rank] == 200 + rank and len(set(pointers)) == RANKS
        assert seen == [f"rank {other}" for other in range(RANKS) if other != rank]


@pytest.mark.parametrize("function", ["vmm_create", "vmm_open"])
def test_when_both_fail_every_rank_says_where_and_why(tmp_path: Path, function: str) -> None:
    for answer in share(tmp_path, {"ipc_export": [0, 2], function: [1]}):
        assert "legacy IPC handles: rank 0" in answer and "rank 2: one_shot_ipc_export: refused" in answer
        assert (
            "virtual memory with file descriptors: rank" in answer
            and f"one_shot_{function}: refused" in answer
        )


def test_ranks_of_two_machines_are_refused(tmp_path: Path) -> None:
    for answer in share(tmp_path, {}, ("a", "a", "b")):
        assert answer == "ranks [2] run on another machine than rank 0"
