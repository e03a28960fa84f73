"""The kernels on a GPU behind the interface of ``kernels.OneShotKernels``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.one_shot import buffers, build, settings
from sglang.srt.distributed.one_shot.errors import NotBuilt, OneShotError, PeerTimeout, Unsupported
from sglang.srt.distributed.one_shot.kernels import (
    MAX_HIDDEN,
    MAX_RANKS,
    MAX_ROWS,
    MIN_RANKS,
    PREFLIGHT,
    PREFLIGHT_LIMIT_S,
    VECTOR,
    OneShotKernels,
    WorkspaceSpec,
)
from sglang.srt.distributed.one_shot.library import VARIANTS, Call, Control, Library
from sglang.srt.distributed.one_shot.protocol import Variant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1}
OUT_OF_TIME, ABORTED = 1, 2


class _Workspace:
    """One workspace of this rank: a launch structure with everything filled in that does not change."""

    def __init__(
        self,
        library: Library,
        name: str,
        spec: WorkspaceSpec,
        rank: int,
        ranks: int,
        control: tuple[int, int],
    ) -> None:
        self.name, self.spec, self.rank = name, spec, rank
        self.pairs = list(combinations(range(ranks), 2)) if name == PREFLIGHT else []
        self.layout = library.layout(spec.max_rows, spec.max_hidden, spec.max_blocks, ranks, bool(self.pairs))
        self.control = Control.from_address(control[0])
        self.stream: torch.cuda.Stream | None = None  # of the last launch that was not captured
        self.call = Call(
            control=control[1],
            layout=self.layout,
            rank=rank,
            ranks=ranks,
            members=(1 << ranks) - 1,
            max_blocks=spec.max_blocks,
        )

    def attach(self, starts: Sequence[int]) -> None:
        """Where this workspace lies at every rank."""
        self.call.base[: len(starts)] = list(starts)

    def error(self) -> PeerTimeout | None:
        """What a kernel wrote, if a wait ran out."""
        c = self.control
        if not c.code:
            return None
        return PeerTimeout(
            self.rank,
            c.peer,
            self.name,
            channel=c.channel,
            stage=c.stage,
            epoch=c.epoch,
            seen=c.seen,
            aborted=c.code == ABORTED,
        )


class CudaKernels(OneShotKernels):
    """One rank on one device. Made by :func:`open_cuda_kernels` or, for tests, :func:`open_local_kernels`."""

    def __init__(
        self,
        library: Library,
        how: str,
        device: int,
        rank: int,
        ranks: int,
        workspaces: Mapping[str, WorkspaceSpec],
    ) -> None:
        self.rank, self.world_size, self.workspaces = rank, ranks, dict(workspaces)
        self.device, self._library, self._how = device, library, how
        self._stride = max(64, ctypes.sizeof(Control))
        self._controls = self._control_memory()
        self._spaces = {
            name: _Workspace(
                library,
                name,
                spec,
                rank,
                ranks,
                (self._controls[0] + n * self._stride, self._controls[1] + n * self._stride),
            )
            for n, (name, spec) in enumerate(self.workspaces.items())
        }
        self._buffers: buffers.SharedBuffers | None = None
        self.dependent_launch = settings.dependent_launch()
        # For measuring: CTAs a row (fused) or threads a CTA (plain) of calls in packets, the same on every rank.
        self.packet_shape = 0
        # Race tests set these; an ordinary library ignores them.
        self.weaken, self.delay_ns = 0, 0

    def _control_memory(self) -> tuple[int, int]:
        host, mapped = ctypes.c_uint64(), ctypes.c_uint64()
        size = self._stride * len(self.workspaces)
        self._library.call("alloc_control", self.device, size, ctypes.byref(host), ctypes.byref(mapped))
        return host.value, mapped.value

    @property
    def bytes_needed(self) -> int:
        """Bytes of one rank's buffer: all workspaces one after the other."""
        return sum(space.layout.bytes for space in self._spaces.values())

    def attach(self, shared: buffers.SharedBuffers) -> None:
        """Use these buffers, one a rank, of at least :attr:`bytes_needed`."""
        self._buffers, at = shared, 0
        for space in self._spaces.values():
            space.attach([pointer + at for pointer in shared.pointers])
            at += space.layout.bytes

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
        out = torch.empty_like(x) if out is None else out
        self._check_tensors(x, out, workspace=workspace, variant=variant)
        call = self._prepare(x, out, workspace, variant, limit_s)
        if members is not None:
            self._take_pair(call, self._spaces[workspace], members)
        self._launch(call, self._spaces[workspace])
        return out

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
        out = torch.empty_like(x) if out is None else out
        residual_out = torch.empty_like(x) if residual_out is None else residual_out
        self._check_tensors(x, residual, out, residual_out, workspace=workspace, variant=variant)
        self.require(gain, workspace=workspace)
        if gain.shape != x.shape[-1:] or gain.dtype != x.dtype or gain.device != x.device:
            raise Unsupported(
                f"one-shot all-reduce: gain {tuple(gain.shape)} {gain.dtype} on {gain.device} does not "
                f"fit x {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        call = self._prepare(x, out, workspace, variant, limit_s)
        call.fused, call.eps = 1, eps
        call.residual, call.residual_out = residual.data_ptr(), residual_out.data_ptr()
        call.weight = gain.data_ptr()
        self._launch(call, self._spaces[workspace])
        return out, residual_out

    def check(self, workspace: str | None = None) -> None:
        for space in self._spaces.values() if workspace is None else (self._spaces[workspace],):
            error = space.error()
            if error is not None:
                raise error

    def abort(self, workspace: str | None = None) -> None:
        for space in self._spaces.values() if workspace is None else (self._spaces[workspace],):
            space.control.abort = 1

    def close(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
            for space in self._spaces.values():
                space.control = Control()
            self._library.call("free_control", self._controls[0])

    def describe(self) -> list[tuple[str, str]]:
        shared = self._buffers
        return [
            ("kernels", self._how),
            ("sharing", shared.method.value if shared else "closed"),
            ("ranks", str(self.world_size)),
            *(
                (f"workspace {name}", f"{space.layout.bytes / 2**20:.1f} MiB, up to {space.spec}")
                for name, space in self._spaces.items()
            ),
        ]

    def counters(self, workspace: str) -> list[int]:
        """Epoch of each channel, for a report: ranks that made the same calls have the same ones. Synchronises."""
        space = self._spaces[workspace]
        at, channels = space.call.base[self.rank] + space.layout.epochs, space.layout.channels
        raw = self._library.read(self.device, at, 8 * channels)
        return [int.from_bytes(raw[8 * n : 8 * n + 8], "little") for n in range(channels)]

    def slot_bytes(self, workspace: str, channel: int, buffer: int, source: int, size: int) -> bytes:
        """What ``source`` pushed into this rank's slot, as the owner of the memory reads it. Synchronises."""
        space = self._spaces[workspace]
        cell = (channel * 2 + buffer) * self.world_size + source
        at = space.call.base[self.rank] + space.layout.slots + cell * space.layout.capacity * 2 * VECTOR
        return self._library.read(self.device, at, size)

    def _check_tensors(
        self, x: torch.Tensor, *others: torch.Tensor, workspace: str, variant: Variant
    ) -> None:
        self.require(x, *others, workspace=workspace, variant=variant)
        if x.device.type != "cuda" or x.device.index != self.device:
            raise Unsupported(
                f"one-shot all-reduce: a tensor on {x.device}, the buffers are on cuda:{self.device}"
            )
        for other in others:
            if other.shape != x.shape:
                raise Unsupported(
                    f"one-shot all-reduce: shapes {tuple(x.shape)} and {tuple(other.shape)} differ"
                )

    def _prepare(
        self, x: torch.Tensor, out: torch.Tensor, workspace: str, variant: Variant, limit_s: float | None
    ) -> Call:
        space = self._spaces[workspace]
        if space.control.code:
            self.check(workspace)
        if self._buffers is None:
            raise OneShotError("one-shot all-reduce: the workspaces are closed")
        if limit_s is None:
            limit_s = PREFLIGHT_LIMIT_S if workspace == PREFLIGHT else 0.0
        call = Call.from_buffer_copy(space.call)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.hidden = x.shape[-1]
        call.rows = x.numel() // x.shape[-1]
        call.dtype = _DTYPE_CODES[x.dtype]
        call.variant = VARIANTS[variant]
        call.shape = self.packet_shape if variant is Variant.PACKETS else 0
        call.limit_ns = int(limit_s * 1e9)
        call.dependent_launch = int(self.dependent_launch)
        call.weaken, call.delay_ns = self.weaken, self.delay_ns
        return call

    def _take_pair(self, call: Call, space: _Workspace, members: Sequence[int]) -> None:
        pair = tuple(sorted(members))
        if pair not in space.pairs or self.rank not in pair or call.variant:
            raise Unsupported(
                f"members {list(members)} on workspace {space.name}: only two different ranks, one of them rank "
                f"{self.rank}, one-shot, on workspace {PREFLIGHT}"
            )
        call.members = (1 << pair[0]) | (1 << pair[1])
        call.first_channel = space.spec.max_blocks + space.pairs.index(pair)
        call.max_blocks = 1

    def _launch(self, call: Call, space: _Workspace) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream != space.stream:
            self._follow(space, stream)
        if torch.cuda.current_device() == self.device:
            self._library.call("launch", ctypes.byref(call), stream.cuda_stream)
        else:
            with torch.cuda.device(self.device):
                self._library.call("launch", ctypes.byref(call), stream.cuda_stream)

    @staticmethod
    def _follow(space: _Workspace, stream: torch.cuda.Stream) -> None:
        """Launches on a workspace follow one another on the device, also where the host changes streams in between.

        A warm-up on the capture's stream and the first eager step on the server's are such a pair. A captured launch
        is ordered by the stream that its graph is replayed on.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        if space.stream is not None:
            stream.wait_stream(space.stream)
        space.stream = stream


def _refuse_specs(ranks: int, workspaces: Mapping[str, WorkspaceSpec]) -> None:
    if not MIN_RANKS <= ranks <= MAX_RANKS:
        raise Unsupported(f"one-shot all-reduce: {ranks} ranks; {MIN_RANKS} to {MAX_RANKS} are possible")
    for name, spec in workspaces.items():
        rows = 1 <= spec.max_rows <= MAX_ROWS
        hidden = VECTOR <= spec.max_hidden <= MAX_HIDDEN and spec.max_hidden % VECTOR == 0
        # One CTA has 512 threads of one 16-byte unit each, of calls in packets 256 where there are many ranks.
        threads = 512 if ranks <= 4 else 256
        if not rows or not hidden or spec.max_blocks * threads * VECTOR < spec.max_hidden:
            raise Unsupported(f"one-shot all-reduce: workspace {name} {spec} is outside the kernels' limits")


def refuse_device(multiprocessors: int, workspaces: Mapping[str, WorkspaceSpec]) -> None:
    """A call ends only if all its CTAs are resident at once on every rank; beyond ``max_blocks`` rows take turns.

    A multiprocessor holds at least one CTA of every kernel. The quarter on top is for clusters, which may not span
    the parts that a device is divided into.

    Raises:
        Unsupported: a device, or a slice of one, that is too small.
    """
    most = max(spec.max_blocks for spec in workspaces.values())
    if multiprocessors * 4 < most * 5:
        raise Unsupported(
            f"one-shot all-reduce: {most} CTAs have to be resident at once, which takes {-(-most * 5 // 4)} "
            f"multiprocessors; this device has {multiprocessors}"
        )


def _load(
    device: int, workspaces: Mapping[str, WorkspaceSpec], defines: Sequence[str] = ()
) -> tuple[Library, str]:
    refuse_device(torch.cuda.get_device_properties(device).multi_processor_count, workspaces)
    built = build.locate(torch.cuda.get_device_capability(device), defines)
    library = Library(built.path)
    library.call("load", device)
    return library, built.how


def open_cuda_kernels(
    group: ProcessGroup, device: torch.device, workspaces: Mapping[str, WorkspaceSpec]
) -> OneShotKernels:
    """See ``kernels.open_kernels``."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _refuse_specs(ranks, workspaces)
    index = torch.cuda.current_device() if device.index is None else device.index
    kernels: CudaKernels | None = None
    error = ""
    try:
        library, how = _load(index, workspaces)
        kernels = CudaKernels(library, how, index, rank, ranks, workspaces)
    except Exception as raised:  # whatever it is, the other ranks wait for this one in the exchange
        error = str(raised) if isinstance(raised, OneShotError) else f"{type(raised).__name__}: {raised}"
    errors = buffers.gather(group, error)
    if any(errors) or kernels is None:
        raise NotBuilt("; ".join(f"rank {other}: {text}" for other, text in enumerate(errors) if text))
    kernels.attach(buffers.share(kernels._library, group, index, kernels.bytes_needed))
    return kernels


def open_local_kernels(
    ranks: int,
    device: torch.device,
    workspaces: Mapping[str, WorkspaceSpec],
    *,
    defines: Sequence[str] = (),
) -> list[CudaKernels]:
    """All ranks in this process on one device, one object a rank, for tests and same-device timings.

    Every rank's calls must run on a stream of its own, and the CTAs of all ranks must fit on the device at once.
    """
    _refuse_specs(ranks, workspaces)
    index = torch.cuda.current_device() if device.index is None else device.index
    library, how = _load(index, workspaces, defines)
    everyone = [CudaKernels(library, how, index, rank, ranks, workspaces) for rank in range(ranks)]
    size = everyone[0].bytes_needed
    pointers = tuple(library.number("alloc", index, size) for _ in range(ranks))

    def free(pointer: int) -> Callable[[], None]:
        return lambda: library.call("free", index, pointer)

    for kernels, pointer in zip(everyone, pointers, strict=True):
        kernels.attach(buffers.SharedBuffers(buffers.Method.LOCAL, size, pointers, [free(pointer)]))
    return everyone
