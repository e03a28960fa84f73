"""What the host does around a launch, with a library that has no device behind it: order of streams, errors of one rank."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sglang.srt.distributed.one_shot import cuda
from sglang.srt.distributed.one_shot.cuda import CudaKernels
from sglang.srt.distributed.one_shot.errors import NotBuilt, Unsupported
from sglang.srt.distributed.one_shot.kernels import WORKSPACES, WorkspaceSpec
from sglang.srt.distributed.one_shot.library import Layout

ROOM = {name: WorkspaceSpec(8, 64) for name in ("eager", "target", "preflight")}


class FakeLibrary:
    """Takes launches and keeps the stream of each."""

    def __init__(self) -> None:
        self.launches: list[int] = []
        self._memory = ctypes.create_string_buffer(4096)

    def layout(self, *_: Any) -> Layout:
        return Layout(bytes=4096, channels=4, capacity=8)

    def call(self, name: str, *arguments: Any) -> None:
        if name == "alloc_control":
            for argument in arguments[2:]:
                argument._obj.value = ctypes.addressof(self._memory)
        elif name == "launch":
            self.launches.append(arguments[1])


class FakeStream:
    """A stream that keeps what it was told to wait for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited = number, []  # type: ignore[var-annotated]

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.cuda_stream)


class Device:
    """What torch says of the device now."""

    stream: Any = None
    capturing = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(CudaKernels, "_check_tensors", lambda *_, **__: None)
    yield made


def opened() -> tuple[CudaKernels, FakeLibrary]:
    library = FakeLibrary()
    kernels = CudaKernels(library, "fake", 0, 0, 2, ROOM)  # type: ignore[arg-type]
    kernels._buffers = object()  # type: ignore[assignment]
    return kernels, library


def test_launches_of_a_workspace_are_ordered_across_streams(device: Device) -> None:
    """A warm-up runs on the capture's stream and the first step on the server's: one counter, one order."""
    kernels, library = opened()
    first, second = FakeStream(1), FakeStream(2)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for device.stream in (first, first, second, second, first):
        kernels.all_reduce(x)
    assert library.launches == [1, 1, 2, 2, 1]
    assert (first.waited, second.waited) == ([2], [1])
    # Another workspace has its own counter, and its own order.
    device.stream = second
    kernels.all_reduce(x, workspace="target")
    assert second.waited == [1]


def test_a_captured_launch_waits_for_no_stream_outside_the_capture(device: Device) -> None:
    """Such a wait would end the capture with an error; a graph is ordered by the stream that it is replayed on."""
    kernels, library = opened()
    first, second = FakeStream(1), FakeStream(2)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    device.stream = first
    kernels.all_reduce(x, workspace="target")
    device.stream, device.capturing = second, True
    kernels.all_reduce(x, workspace="target")
    device.stream, device.capturing = first, False
    kernels.all_reduce(x, workspace="target")
    assert library.launches == [1, 2, 1]
    assert first.waited == second.waited == []


def one_rank_breaks(rank: int, size: int, folder: Path) -> str:
    """Rank 1's library fails in a way that nobody foresaw."""

    def load(*_: Any) -> Any:
        if rank == 1:
            raise KeyError("a surprise")
        return FakeLibrary(), "fake"

    cuda._load = load
    try:
        cuda.open_cuda_kernels(torch.distributed.group.WORLD, torch.device("cuda", 0), ROOM)  # type: ignore[arg-type]
    except NotBuilt as error:
        return str(error)
    return "opened"


def test_whatever_breaks_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """The others are in the exchange by then: an error that passes it by would leave them there."""
    outcomes, seconds = ranks.run(one_rank_breaks, 2, tmp_path)
    for outcome in outcomes:
        assert outcome.value == "rank 1: KeyError: 'a surprise'", outcome.output
    assert seconds < 30


@pytest.mark.parametrize(
    ("multiprocessors", "blocks", "fits"),
    [(132, 64, True), (84, 64, True), (80, 64, True), (79, 64, False), (30, 64, False), (16, 8, True)],
)
def test_a_device_that_cannot_hold_all_ctas_is_refused(multiprocessors: int, blocks: int, fits: bool) -> None:
    """CTAs that wait would hold the place of those that they wait for."""
    spaces = {
        **WORKSPACES,
        **{name: WorkspaceSpec(max_blocks=blocks) for name in ("eager", "target", "draft")},
    }
    if fits:
        cuda.refuse_device(multiprocessors, spaces)
        return
    with pytest.raises(Unsupported, match=f"this device has {multiprocessors}"):
        cuda.refuse_device(multiprocessors, spaces)
