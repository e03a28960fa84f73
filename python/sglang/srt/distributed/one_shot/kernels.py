"""What the communicator calls: one all-reduce, plain or fused with residual add and RMSNorm, over shared workspaces.

``OneShotKernels`` is the interface. ``cuda.CudaKernels`` runs it on a GPU; ``simulated.SimulatedKernels`` runs the
same protocol between threads or processes of one machine, for tests and for development without a GPU.
Get one with :func:`open_kernels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.one_shot.errors import Unsupported
from sglang.srt.distributed.one_shot.protocol import Variant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MIN_RANKS, MAX_RANKS = 2, 8
MAX_ROWS = 64
MAX_HIDDEN = 8192
VECTOR = 8  # elements in one 16-byte store
DTYPES = (torch.bfloat16, torch.float16)
#: Most bytes of a tensor that one call in packets pushes to all peers together (``kPacketBytes`` of the kernels).
PACKET_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkspaceSpec:
    """Room of one workspace. All ranks must ask for the same.

    Attributes:
        max_rows: most rows of one call (1 to 64).
        max_hidden: largest hidden size (multiple of 8, up to 8192).
        max_blocks: most CTAs that one call launches on a rank. All of them must be resident at once on every
            rank; only tests that put several ranks on one device need less than the default.
    """

    max_rows: int = MAX_ROWS
    max_hidden: int = MAX_HIDDEN
    max_blocks: int = 64


PREFLIGHT = "preflight"
PREFLIGHT_LIMIT_S = 5.0

# Work that may be in flight at the same time never shares a workspace. ``preflight`` has one more channel a pair.
WORKSPACES: Mapping[str, WorkspaceSpec] = {
    "eager": WorkspaceSpec(),
    "target": WorkspaceSpec(),
    "draft": WorkspaceSpec(),
    PREFLIGHT: WorkspaceSpec(max_rows=4, max_hidden=2048, max_blocks=4),
}


@dataclass(frozen=True)
class Admission:
    """Whether the kernels are right for a call, and if not, why (one sentence without varying numbers first)."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def packet_bytes(ranks: int) -> int:
    """Bytes of the largest message that is served in packets: by bytes, as tables decide."""
    return PACKET_BYTES // (ranks - 1)


def admit(
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    ranks: int,
    spec: WorkspaceSpec | None = None,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    contiguous: bool = True,
    aligned: bool = True,
    variant: Variant = Variant.ONE_SHOT,
) -> Admission:
    """Whether a call may go to the kernels. A pure function, cheap enough for every call.

    Args:
        rows: product of all dimensions but the last.
        hidden: last dimension.
        dtype: of all tensors of the call.
        ranks: size of the group.
        spec: workspace it would use (default: the largest possible).
        dtypes: what is served.
        contiguous: every tensor of the call is contiguous.
        aligned: every data pointer is a multiple of 16 bytes.
        variant: packets have less room.
    """
    spec = spec or WorkspaceSpec()
    if not MIN_RANKS <= ranks <= MAX_RANKS:
        return Admission(False, f"number of ranks is outside {MIN_RANKS} to {MAX_RANKS}")
    if dtype not in dtypes:
        return Admission(False, f"dtype {str(dtype).removeprefix('torch.')} is not bfloat16 or float16")
    if hidden < VECTOR or hidden % VECTOR:
        return Admission(False, "hidden size is not a multiple of 8")
    if hidden > spec.max_hidden:
        return Admission(False, "hidden size is above the workspace's limit")
    if rows < 1:
        return Admission(False, "no rows")
    if rows > spec.max_rows:
        return Admission(False, "more rows than the workspace has room for")
    if variant is Variant.PACKETS and rows * hidden * dtype.itemsize > packet_bytes(ranks):
        return Admission(False, "the message is too large for packets")
    if not contiguous:
        return Admission(False, "a tensor is not contiguous")
    if not aligned:
        return Admission(False, "a tensor is not aligned to 16 bytes")
    return Admission(True)


def admit_tensors(
    *tensors: torch.Tensor,
    ranks: int,
    spec: WorkspaceSpec | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    variant: Variant = Variant.ONE_SHOT,
) -> Admission:
    """:func:`admit` for the tensors of one call; the first one gives rows, hidden size and dtype."""
    first = tensors[0]
    if first.dim() < 1:
        return Admission(False, "a scalar has no hidden size")
    hidden = first.shape[-1]
    for other in tensors[1:]:
        if other.dtype != first.dtype or other.device != first.device:
            return Admission(False, "tensors differ in dtype or device")
    return admit(
        first.numel() // hidden if hidden else 0,
        hidden,
        first.dtype,
        ranks,
        spec,
        dtypes=dtypes,
        contiguous=all(tensor.is_contiguous() for tensor in tensors),
        aligned=all(tensor.data_ptr() % 16 == 0 for tensor in tensors),
        variant=variant,
    )


class OneShotKernels(ABC):
    """All-reduce of small rows between the ranks of one machine.

    Every rank must make the same calls on one workspace in the same order with the same shapes. Calls on one
    workspace must be ordered on the device (one stream, or streams joined by events); different workspaces are
    independent. All ranks get bitwise equal results: contributions are added in float32 in the order of ranks.
    """

    rank: int
    world_size: int
    workspaces: Mapping[str, WorkspaceSpec]
    #: What is served; simulated peers may take more.
    dtypes: Sequence[torch.dtype] = DTYPES
    #: Factor on the waits of the preflight.
    patience: float = 1.0

    def admit(
        self, *tensors: torch.Tensor, workspace: str = "eager", variant: Variant = Variant.ONE_SHOT
    ) -> Admission:
        """Whether :meth:`all_reduce` and :meth:`all_reduce_rms_norm` take these tensors on that workspace."""
        spec = self.workspaces[workspace]
        return admit_tensors(*tensors, ranks=self.world_size, spec=spec, dtypes=self.dtypes, variant=variant)

    def require(self, *tensors: torch.Tensor, workspace: str, variant: Variant = Variant.ONE_SHOT) -> None:
        """Raises Unsupported if :meth:`admit` refuses, with the shape in the message; KeyError: no such workspace."""
        admission = self.admit(*tensors, workspace=workspace, variant=variant)
        if not admission:
            first = tensors[0]
            raise Unsupported(
                f"one-shot all-reduce: {admission.reason} (shape {tuple(first.shape)}, {first.dtype}, "
                f"{self.world_size} ranks, workspace {workspace} {self.workspaces[workspace]})"
            )

    @abstractmethod
    def all_reduce(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        workspace: str = "eager",
        variant: Variant = Variant.ONE_SHOT,
        limit_s: float | None = None,
        members: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Sum of ``x`` over the ranks, on the current stream; no host synchronisation; may be captured.

        Args:
            x: [..., hidden], bf16 or fp16, contiguous, 16-byte aligned.
            out: same shape and dtype; ``x`` itself is allowed. Allocated if None.
            workspace: a key of :attr:`workspaces`.
            variant: one-shot, reduce-scatter and all-gather, or one-shot in packets.
            limit_s: longest wait for a peer in seconds; 0 waits until :meth:`abort`; None takes the workspace's
                default (0, and 5 s for ``preflight``). Baked into a captured graph.
            members: two ranks, this one included, on the ``preflight`` workspace only: a reduction between that
                pair, through the same kernel. None: all ranks.

        Returns:
            ``out``: float32 sum in the order of ranks, rounded once (all variants alike).

        Raises:
            Unsupported: what :meth:`admit` refuses; ``members`` that do not fit.
            PeerTimeout: an earlier wait on this workspace ran out (seen without synchronising).
        """

    @abstractmethod
    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        *,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        workspace: str = "eager",
        variant: Variant = Variant.ONE_SHOT,
        limit_s: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``h = sum(x) + residual``; returns ``(h / sqrt(mean(h^2) + eps) * gain, h)``; one launch.

        Args:
            x: [..., hidden] partial sums of this rank.
            residual: same shape and dtype, equal on every rank.
            gain: [hidden], same dtype.
            eps: of the RMSNorm.
            out, residual_out: where to write; ``x`` and ``residual`` themselves are allowed. Allocated if None.
            workspace, variant, limit_s: as in :meth:`all_reduce`.

        Returns:
            (normed, new residual), both rounded once from float32. One-shot keeps the sum in float32, in packets or
            not, until the residual is added; two-stage rounds the sum to ``x``'s dtype, as separate kernels do.

        Raises:
            Unsupported, PeerTimeout: as in :meth:`all_reduce`.
        """

    @abstractmethod
    def check(self, workspace: str | None = None) -> None:
        """Raise PeerTimeout if a wait of that workspace (default: any) has run out; never synchronises."""

    @abstractmethod
    def abort(self, workspace: str | None = None) -> None:
        """End every wait of this rank in a workspace (default: any), now and later: for a watchdog. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Release the workspaces. Call on every rank after a device synchronisation and a barrier."""

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """Facts for the doctor: how the kernels were built, how the buffers are shared, bytes of each workspace."""


def open_kernels(
    group: ProcessGroup,
    device: torch.device,
    workspaces: Mapping[str, WorkspaceSpec] = WORKSPACES,
) -> OneShotKernels:
    """Build or load the kernels, allocate the workspaces and share them among the ranks of ``group``. Collective.

    Args:
        group: a CPU process group (gloo) of 2 to 8 ranks of one machine.
        device: this rank's CUDA device. Two ranks may name the same one (tests). A CPU: simulated peers.
        workspaces: name -> room; the same on every rank.

    Raises:
        NotBuilt: neither prebuilt kernels nor a compiler for this device, on this rank or on another (named).
        SharingFailed: neither legacy IPC handles nor file descriptors could be shared.
        Unsupported: number of ranks, or a spec outside the limits.
        Every rank raises if one does.
    """
    if device.type == "cpu":
        from sglang.srt.distributed.one_shot.simulated import open_simulated_kernels

        return open_simulated_kernels(group, workspaces)
    from sglang.srt.distributed.one_shot.cuda import open_cuda_kernels

    return open_cuda_kernels(group, device, workspaces)
