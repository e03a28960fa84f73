"""Peers simulated on a CPU: the protocols of ``protocol.steps`` executed between threads or processes of one machine.

Same interface, same order of summation, same errors as the CUDA kernels. Threads share a :class:`Fabric` object;
processes open one by the same path. A CPU with strong store ordering (x86) keeps the orderings that the CUDA
kernels ask for with release and acquire; what happens without them is the model checker's part (``test/race``).
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.one_shot.errors import PeerTimeout, SharingFailed, Unsupported
from sglang.srt.distributed.one_shot.kernels import (
    DTYPES,
    PREFLIGHT,
    PREFLIGHT_LIMIT_S,
    WORKSPACES,
    OneShotKernels,
    WorkspaceSpec,
)
from sglang.srt.distributed.one_shot.protocol import (
    SAFE,
    Kind,
    Safety,
    Step,
    Variant,
    peers_of,
    reached,
    steps,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FLAG_BYTES = 8  # int64
_ELEMENT_BYTES = 4  # room for the widest dtype

# Called before each step; False skips it (a lost flag, a lost store); it may also sleep (a late rank).
Intercept = Callable[[Step], bool]


class Fabric:
    """The memory of all ranks: slots and flags of every workspace; zero at first, never reset."""

    def __init__(
        self, ranks: int, workspaces: Mapping[str, WorkspaceSpec] = WORKSPACES, path: Path | None = None
    ) -> None:
        """Args: number of ranks; workspaces; a file that all processes name alike (None: threads)."""
        self.ranks, self.workspaces = ranks, dict(workspaces)
        self.pairs = list(combinations(range(ranks), 2))
        self._bases: dict[str, tuple[int, int]] = {}
        size = 0
        for name, spec in self.workspaces.items():
            slot = spec.max_rows * spec.max_hidden * _ELEMENT_BYTES
            self._bases[name] = (size, slot)
            cells = ranks * self.channels(name) * 2 * ranks
            size += cells * (_FLAG_BYTES + 4 * slot)
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with path.open("a+b") as file:
                file.truncate(size)  # grows once; sparse until touched
                self._map = mmap.mmap(file.fileno(), size)
        self._bytes = torch.frombuffer(memoryview(self._map), dtype=torch.uint8)

    def channels(self, workspace: str) -> int:
        """Channels of a workspace: one for all ranks; ``preflight`` has one more for each pair."""
        return 1 + (len(self.pairs) if workspace == PREFLIGHT else 0)

    def _cell(self, workspace: str, owner: int, channel: int, stage: int, source: int) -> int:
        return ((owner * self.channels(workspace) + channel) * 2 + stage) * self.ranks + source

    def flag(self, workspace: str, owner: int, channel: int, stage: int, source: int) -> torch.Tensor:
        """int64 scalar: the last epoch that ``source`` published to ``owner``."""
        at = self._bases[workspace][0] + _FLAG_BYTES * self._cell(workspace, owner, channel, stage, source)
        return self._bytes[at : at + _FLAG_BYTES].view(torch.int64)[0]

    def slot(
        self, workspace: str, owner: int, channel: int, stage: int, source: int, buffer: int, size: int
    ) -> torch.Tensor:
        """uint8 [size]: what ``source`` pushed to ``owner``."""
        base, slot = self._bases[workspace]
        base += _FLAG_BYTES * self.ranks * self.channels(workspace) * 2 * self.ranks
        at = base + slot * (2 * self._cell(workspace, owner, channel, stage, source) + buffer)
        return self._bytes[at : at + size]

    def packets(
        self, workspace: str, owner: int, channel: int, source: int, buffer: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [size / 8] each: data and epochs of the packets that ``source`` sent to ``owner``.

        On a GPU the two are one word; here the data lies first and is written first, which a processor with strong
        store ordering keeps.
        """
        base, slot = self._bases[workspace]
        base += (_FLAG_BYTES + 2 * slot) * self.ranks * self.channels(workspace) * 2 * self.ranks
        at = base + 2 * slot * self._cell(workspace, owner, channel, buffer, source)  # one stage, two buffers
        return tuple(self._bytes[at + k * slot : at + k * slot + size].view(torch.int64) for k in (0, 1))  # type: ignore[return-value]


class SimulatedKernels(OneShotKernels):
    """One rank of a :class:`Fabric`. A wait polls; a bounded one raises PeerTimeout where the GPU writes a record.

    ``dtypes`` are the kernels' own unless told otherwise: a server that is held against one rank's texts computes in
    float32, which only simulated peers take. ``patience`` stretches the preflight's waits: a GPU's peers run all the
    time, a process of a busy machine may stand still for seconds.
    """

    def __init__(
        self,
        fabric: Fabric,
        rank: int,
        *,
        safety: Safety = SAFE,
        intercept: Intercept | None = None,
        dtypes: Sequence[torch.dtype] = DTYPES,
        patience: float = 10.0,
    ) -> None:
        self.patience = patience
        self.fabric, self.rank, self.world_size = fabric, rank, fabric.ranks
        self.workspaces = fabric.workspaces
        self._safety, self._intercept, self.dtypes = safety, intercept, tuple(dtypes)
        self._epochs: dict[tuple[str, int], int] = {}
        self._failed: dict[str, PeerTimeout] = {}
        self._aborted = {name: threading.Event() for name in self.workspaces}

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
        self.require(x, out, workspace=workspace, variant=variant)
        out.copy_(self._sum(x, workspace, variant, limit_s, members))
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
        self.require(x, residual, gain, out, residual_out, workspace=workspace, variant=variant)
        hidden = self._sum(x, workspace, variant, limit_s, None) + residual.float()
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        residual_out.copy_(hidden)
        out.copy_(hidden * scale * gain.float())
        return out, residual_out

    def check(self, workspace: str | None = None) -> None:
        for name, error in self._failed.items():
            if workspace in (None, name):
                raise error

    def abort(self, workspace: str | None = None) -> None:
        for name, event in self._aborted.items():
            if workspace in (None, name):
                event.set()

    def close(self) -> None:
        self._epochs.clear()

    def describe(self) -> list[tuple[str, str]]:
        return [
            ("kernels", "simulated on the CPU"),
            ("sharing", "one mapping"),
            ("ranks", str(self.world_size)),
        ]

    def _channel(self, workspace: str, members: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
        if members is None:
            return 0, tuple(range(self.world_size))
        pair = tuple(sorted(members))
        if workspace != PREFLIGHT or pair not in self.fabric.pairs or self.rank not in pair:
            raise Unsupported(
                f"members {list(members)} on workspace {workspace}: only two different ranks, one of them rank "
                f"{self.rank}, on workspace {PREFLIGHT}"
            )
        return 1 + self.fabric.pairs.index(pair), pair

    def _sum(
        self,
        x: torch.Tensor,
        workspace: str,
        variant: Variant,
        limit_s: float | None,
        members: Sequence[int] | None,
    ) -> torch.Tensor:
        """float32 sum of ``x`` over the members; two-stage: rounded to ``x``'s dtype in between."""
        self.check(workspace)
        channel, ranks = self._channel(workspace, members)
        epoch = self._epochs[workspace, channel] = self._epochs.get((workspace, channel), 0) + 1
        if limit_s is None:
            limit_s = PREFLIGHT_LIMIT_S if workspace == PREFLIGHT else 0.0
        parts = list(x.contiguous().view(-1).chunk(len(ranks))) if variant is Variant.TWO_STAGE else []
        parts += [x.new_empty(0)] * (len(ranks) - len(parts))
        mine = ranks.index(self.rank)
        outgoing = [parts[ranks.index(p)] if variant is Variant.TWO_STAGE else x.view(-1) for p in ranks]
        gathered: dict[int, torch.Tensor] = {self.rank: outgoing[mine]}
        stage = 0
        for step in steps(self.rank, ranks, epoch, variant, self._safety):
            if step.stage != stage:  # the reduced shard goes to everyone
                stage = step.stage
                reduced = self._ordered(gathered, ranks).to(x.dtype)
                outgoing, gathered = [reduced] * len(ranks), {self.rank: reduced}
            if self._intercept is not None and not self._intercept(step):
                continue
            data = outgoing[ranks.index(step.peer)]
            if step.packets:
                received = self._packets(workspace, channel, step, data, limit_s)
                if received is not None:
                    gathered[step.peer] = received
            elif step.kind is Kind.PUSH:
                raw = data.contiguous().view(torch.uint8)
                self.fabric.slot(
                    workspace, step.peer, channel, stage, self.rank, step.buffer, raw.numel()
                ).copy_(raw)
            elif step.kind is Kind.PUBLISH:
                self.fabric.flag(workspace, step.peer, channel, stage, self.rank).fill_(
                    epoch % (1 << self._safety.flag_bits)
                )
            elif step.kind is Kind.AWAIT:
                self._await(workspace, channel, step, limit_s)
            else:
                sent = parts[ranks.index(step.peer)] if stage else outgoing[mine]
                raw = self.fabric.slot(
                    workspace,
                    self.rank,
                    channel,
                    stage,
                    step.peer,
                    step.buffer,
                    sent.numel() * sent.element_size(),
                )
                gathered[step.peer] = raw.clone().view(x.dtype)
        if variant is Variant.TWO_STAGE:
            return torch.cat([gathered[rank].view(-1) for rank in ranks]).view(x.shape).float()
        return self._ordered(gathered, ranks).view(x.shape)

    @staticmethod
    def _ordered(parts: Mapping[int, torch.Tensor], ranks: Sequence[int]) -> torch.Tensor:
        total = parts[ranks[0]].float()
        for rank in ranks[1:]:
            total = total + parts[rank].float()
        return total

    def _packets(
        self, workspace: str, channel: int, step: Step, data: torch.Tensor, limit_s: float
    ) -> torch.Tensor | None:
        """Push to a peer, or what came from it."""
        size = data.numel() * data.element_size()
        if step.kind is Kind.PUSH:
            words, epochs = self.fabric.packets(workspace, step.peer, channel, self.rank, step.buffer, size)
            words.copy_(data.contiguous().view(torch.int64))
            epochs.fill_(step.epoch)
            return None
        words, epochs = self.fabric.packets(workspace, self.rank, channel, step.peer, step.buffer, size)

        def arrived() -> bool:
            mine = epochs == step.epoch if self._safety.own_epoch else epochs != 0
            return bool(mine.all())

        self._wait(workspace, channel, step, limit_s, arrived, lambda: int(epochs.min()))
        return words.clone().view(data.dtype)

    def _await(self, workspace: str, channel: int, step: Step, limit_s: float) -> None:
        flag = self.fabric.flag(workspace, self.rank, channel, step.stage, step.peer)
        bits = self._safety.flag_bits
        self._wait(
            workspace, channel, step, limit_s, lambda: reached(int(flag), step.epoch, bits), lambda: int(flag)
        )

    def _wait(
        self,
        workspace: str,
        channel: int,
        step: Step,
        limit_s: float,
        arrived: Callable[[], bool],
        seen: Callable[[], int],
    ) -> None:
        """Poll until ``arrived``; ``seen`` is the newest epoch of what is awaited, for the error."""
        deadline = time.monotonic() + limit_s if limit_s else float("inf")
        while not arrived():
            aborted = self._aborted[workspace].is_set()
            if aborted or time.monotonic() > deadline:
                self._failed[workspace] = PeerTimeout(
                    self.rank,
                    step.peer,
                    workspace,
                    channel=channel,
                    stage=step.stage,
                    epoch=step.epoch,
                    seen=seen(),
                    aborted=aborted,
                )
                raise self._failed[workspace]
            time.sleep(0)


def open_simulated_kernels(
    group: ProcessGroup, workspaces: Mapping[str, WorkspaceSpec] = WORKSPACES
) -> SimulatedKernels:
    """Simulated peers among the ranks of a CPU process group; float32 is served too. Collective.

    The memory is a file that has no name any more once all ranks have mapped it.

    Raises:
        SharingFailed: a rank cannot map it; on every rank, naming it.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    place: list[str] = [tempfile.mkdtemp(prefix="sglang-peers-") if rank == 0 else ""]
    dist.broadcast_object_list(place, src=dist.get_process_group_ranks(group)[0], group=group)
    folder, fabric, problem = Path(place[0]), None, ""
    try:
        fabric = Fabric(ranks, workspaces, folder / "fabric")
    except OSError as error:
        problem = str(error)
    problems: list[str] = [""] * ranks
    dist.all_gather_object(problems, problem, group=group)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    if fabric is None or any(problems):
        words = [f"rank {other}: {text}" for other, text in enumerate(problems) if text]
        raise SharingFailed(f"simulated peers: {'; '.join(words)}")
    return SimulatedKernels(fabric, rank, dtypes=(*DTYPES, torch.float32))


def spawn_threads(ranks: int, work: Callable[[int], object], deadline_s: float = 60.0) -> list[object]:
    """Run ``work(rank)`` in one thread a rank and return the results (an exception is a result).

    Raises:
        TimeoutError: a thread is not done in time; it is named.
    """
    results: list[object] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise TimeoutError(f"simulated rank {rank} is not done after {deadline_s} s")
    return results


__all__ = [
    "Fabric",
    "Intercept",
    "SimulatedKernels",
    "open_simulated_kernels",
    "peers_of",
    "spawn_threads",
]
