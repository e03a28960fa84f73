"""Device buffers that every rank of one machine can write to: allocated by us, shared by handle, mapped at each peer.

Two methods. Legacy IPC: ``cudaMalloc`` and ``cudaIpcGetMemHandle``. Virtual memory, where the first is refused (as
in some virtual machines): ``cuMemCreate`` with an exportable file descriptor, passed over a Unix socket,
then ``cuMemMap``. Neither takes memory from PyTorch's allocator, so ``expandable_segments`` does not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Method(Enum):
    """How buffers are shared."""

    IPC = "legacy IPC handles"
    FILE_DESCRIPTORS = "virtual memory with file descriptors"


class SharedBuffers(ABC):
    """One buffer a rank, zeroed, mapped at every rank.

    Attributes:
        method: how the buffers are shared (the same on all ranks).
        size: bytes of each rank's buffer.
        pointers: device address of every rank's buffer in this process, by rank.
    """

    method: Method
    size: int
    pointers: tuple[int, ...]

    @abstractmethod
    def close(self) -> None:
        """Unmap the peers' buffers and free the own one; after a device synchronisation and a barrier."""


def share(
    group: ProcessGroup, device: torch.device, size: int, method: Method | None = None
) -> SharedBuffers:
    """Allocate ``size`` zeroed bytes on ``device`` on every rank of ``group`` and map them everywhere. Collective.

    Args:
        group: CPU process group (gloo) of ranks on one machine.
        device: this rank's CUDA device.
        size: bytes, rounded up to the allocation granularity.
        method: None tries legacy IPC first, then file descriptors; all ranks agree on one.

    Raises:
        SharingFailed: on every rank, with each method's error and the rank where it happened.
    """
    raise NotImplementedError("written next")
