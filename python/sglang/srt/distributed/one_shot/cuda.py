"""The kernels on a GPU behind the interface of ``kernels.OneShotKernels``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang.srt.distributed.one_shot.errors import NotBuilt
from sglang.srt.distributed.one_shot.kernels import OneShotKernels, WorkspaceSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def open_cuda_kernels(
    group: ProcessGroup, device: torch.device, workspaces: Mapping[str, WorkspaceSpec]
) -> OneShotKernels:
    """See ``kernels.open_kernels``."""
    raise NotBuilt("the CUDA kernels are not in this build yet")
