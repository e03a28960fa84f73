"""Device buffers that every rank of one machine can write to: allocated by us, shared by handle, mapped at each peer.

Two methods. Legacy IPC: ``cudaMalloc`` and ``cudaIpcGetMemHandle``. Virtual memory, where the first is refused (as
in some virtual machines): ``cuMemCreate`` with an exportable file descriptor, passed over a Unix socket,
then ``cuMemMap``. Neither takes memory from PyTorch's allocator, so ``expandable_segments`` does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_int32, c_uint64, create_string_buffer
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.distributed.one_shot.descriptors import exchange_descriptors
from sglang.srt.distributed.one_shot.errors import OneShotError, SharingFailed
from sglang.srt.distributed.one_shot.library import HANDLE_BYTES, Library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Method(Enum):
    """How buffers are shared."""

    IPC = "legacy IPC handles"
    FILE_DESCRIPTORS = "virtual memory with file descriptors"
    LOCAL = "one process"


@dataclass
class SharedBuffers:
    """One zeroed buffer a rank, mapped at every rank.

    Attributes:
        method: how the buffers are shared (the same on all ranks).
        size: bytes of each rank's buffer.
        pointers: device address of every rank's buffer in this process, by rank.
    """

    method: Method
    size: int
    pointers: tuple[int, ...]
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """Unmap the peers' buffers and free the own one; after a device synchronisation and a barrier."""
        undo, self._undo = self._undo, []
        self.pointers = ()
        for step in reversed(undo):
            step()


def gather(group: ProcessGroup, value: Any) -> list[Any]:
    """Every rank's ``value`` in the order of ranks."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def share(
    library: Library, group: ProcessGroup, device: int, size: int, method: Method | None = None
) -> SharedBuffers:
    """Allocate ``size`` zeroed bytes on ``device`` on every rank of ``group`` and map them everywhere. Collective.

    Args:
        library: the compiled library.
        group: CPU process group (gloo) of ranks on one machine.
        device: index of this rank's CUDA device.
        size: bytes, the same on every rank; rounded up to the allocation granularity.
        method: None tries legacy IPC first, then file descriptors; all ranks agree on one.

    Raises:
        SharingFailed: on every rank, with each method's error and the rank where it happened.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group)
    machines = gather(group, _machine())
    strangers = [other for other, machine in enumerate(machines) if machine != machines[0]]
    if strangers:
        raise SharingFailed(f"ranks {strangers} run on another machine than rank 0")
    failures = []
    for attempt in (method,) if method else (Method.IPC, Method.FILE_DESCRIPTORS):
        undo: list[Callable[[], None]] = []
        error = ""
        pointers: tuple[int, ...] = ()
        actual = size
        try:
            by = _by_ipc if attempt is Method.IPC else _by_descriptors
            pointers, actual = by(library, group, rank, device, size, undo)
        except (OneShotError, OSError) as raised:
            error = str(raised)
        errors = gather(group, error)
        if not any(errors):
            return SharedBuffers(attempt, actual, pointers, undo)
        SharedBuffers(attempt, actual, pointers, undo).close()
        # What went wrong before handles were exchanged is known to all ranks, in the same words.
        texts = dict.fromkeys(
            text if text.startswith("rank ") else f"rank {other}: {text}"
            for other, text in enumerate(errors)
            if text
        )
        failures.append(f"{attempt.value}: {'; '.join(texts)}")
    raise SharingFailed("buffers cannot be shared: " + "; ".join(failures))


def _machine() -> str:
    """Identity of the running kernel: containers of one machine agree, and two machines do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _by_ipc(
    library: Library,
    group: ProcessGroup,
    rank: int,
    device: int,
    size: int,
    undo: list[Callable[[], None]],
) -> tuple[tuple[int, ...], int]:
    own, handle, error = 0, create_string_buffer(HANDLE_BYTES), ""
    try:
        own = library.number("alloc", device, size)
        undo.append(lambda: library.call("free", device, own))
        library.call("ipc_export", device, own, handle)
    except OneShotError as raised:
        error = str(raised)
    # Whoever failed says so here, where the others wait for its handle.
    offers = gather(group, (error, handle.raw))
    failed = [f"rank {other}: {text}" for other, (text, _) in enumerate(offers) if text]
    if failed:
        raise OneShotError("; ".join(failed))
    pointers = []
    for other, (_, data) in enumerate(offers):
        if other == rank:
            pointers.append(own)
            continue
        try:
            at = library.number("ipc_open", device, data)
        except OneShotError as raised:
            raise OneShotError(f"buffer of rank {other}: {raised}") from raised
        undo.append(lambda at=at: library.call("ipc_close", device, at))  # type: ignore[misc]
        pointers.append(at)
    return tuple(pointers), size


def _by_descriptors(
    library: Library,
    group: ProcessGroup,
    rank: int,
    device: int,
    size: int,
    undo: list[Callable[[], None]],
) -> tuple[tuple[int, ...], int]:
    room, own, descriptor, error = c_uint64(size), c_uint64(), c_int32(-1), ""
    try:
        library.call("vmm_create", device, byref(room), byref(own), byref(descriptor))
        undo.append(lambda: library.call("vmm_close", device, own.value, room.value))
    except OneShotError as raised:
        error = str(raised)
    offers = gather(group, (error, room.value))
    failed = [f"rank {other}: {text}" for other, (text, _) in enumerate(offers) if text]
    if not failed and len({bytes_ for _, bytes_ in offers}) > 1:
        failed = [f"sizes differ after rounding: {[bytes_ for _, bytes_ in offers]}"]
    pointers = [own.value] * len(offers)
    with exchange_descriptors(
        lambda value: gather(group, value), rank, len(offers), None if failed else descriptor.value
    ) as received:
        if failed:
            raise OneShotError("; ".join(failed))
        for other, fd in received.items():
            try:
                pointers[other] = library.number("vmm_open", device, fd, room.value)
            except OneShotError as raised:
                raise OneShotError(f"buffer of rank {other}: {raised}") from raised
            undo.append(lambda at=pointers[other]: library.call("vmm_close", device, at, room.value))  # type: ignore[misc]
    return tuple(pointers), room.value
