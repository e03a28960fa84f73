"""What a group's all-reduce calls: who reduces this message, on which workspace, and the kernel's launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from sglang.fork import fallbacks
from sglang.srt.distributed.one_shot import capture, gate
from sglang.srt.distributed.one_shot.kernels import DTYPES, OneShotKernels, WorkspaceSpec, admit, packet_bytes
from sglang.srt.distributed.one_shot.policy import (
    FUSED,
    ONE_SHOT,
    OURS,
    PACKETS,
    PLAIN,
    STOCK,
    TWO_STAGE,
    Choice,
    Table,
)
from sglang.srt.distributed.one_shot.protocol import Variant

#: Name of the path in the fallback counters.
PATH = "one-shot-all-reduce"

_Shape = tuple[str, int, int, torch.dtype]


def decide(
    table: Table,
    ranks: int,
    kind: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    spec: WorkspaceSpec | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Choice:
    """Who reduces a message, by the kernels' limits, then the table, then the room of packets. A pure function.

    Args:
        table: of the machine, with its protocol.
        ranks: size of the group.
        kind: ``PLAIN`` or ``FUSED``.
        rows: of the message.
        hidden: elements a row.
        dtype: of an element.
        spec: the workspace's room (default: the largest possible).
        dtypes: what the kernels serve.
    """
    admission = admit(rows, hidden, dtype, ranks, spec, dtypes=dtypes)
    if not admission:
        return Choice(STOCK, admission.reason)
    size = rows * hidden * dtype.itemsize
    choice = table.choose(kind, size)
    if choice.method == PACKETS and size > packet_bytes(ranks):
        return Choice(ONE_SHOT, f"{choice.reason}; too large for packets", choice.measured)
    return choice


@dataclass
class Communicator:
    """The one-shot all-reduce of one process group.

    Every decision is a function of kind, rows, hidden size and dtype, which all ranks share.

    Attributes:
        kernels: opened on all ranks, preflight passed.
        table: the same on all ranks.
        device: of this rank's tensors.
        wait_s: longest wait of an eager launch for a peer in seconds; captured launches wait until aborted.
        calls: launches by kind and method, replays not included.
        places: the same by workspace, kind and method: what a graph of the target or the draft holds.
    """

    kernels: OneShotKernels
    table: Table
    device: torch.device
    wait_s: float = 300.0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    places: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _choices: dict[_Shape, Choice] = field(default_factory=dict)
    _hidden: int = 0

    def choose(self, kind: str, rows: int, hidden: int, dtype: torch.dtype) -> Choice:
        """Who reduces a message of this shape; decided once, then looked up."""
        shape = (kind, rows, hidden, dtype)
        found = self._choices.get(shape)
        if found is None:
            found = self._choices[shape] = self._decide(*shape)
        return found

    def _decide(self, kind: str, rows: int, hidden: int, dtype: torch.dtype) -> Choice:
        spec, ranks = self.kernels.workspaces[capture.EAGER], self.kernels.world_size
        return decide(self.table, ranks, kind, rows, hidden, dtype, spec=spec, dtypes=self.kernels.dtypes)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``all_reduce`` is to serve this tensor; the same answer on every rank."""
        if x.device.type != self.device.type or x.dim() == 0 or not x.is_contiguous():
            return False
        hidden = x.shape[-1]
        if hidden == 0:
            return False
        self._hidden = self._hidden or hidden
        return self.choose(PLAIN, x.numel() // hidden, hidden, x.dtype).method != STOCK

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks as a new tensor. Only after ``takes`` said yes.

        Raises:
            PeerTimeout: an earlier launch on this workspace waited in vain: results since then are not sums.
        """
        hidden = x.shape[-1]
        choice = self.choose(PLAIN, x.numel() // hidden, hidden, x.dtype)
        workspace = self._count(PLAIN, choice.method)
        return self.kernels.all_reduce(
            gate.aligned(x), workspace=workspace, variant=_variant(choice), limit_s=self._limit(workspace)
        )

    def fuses(self, rows: int) -> bool:
        """Whether a reduction of this many rows should be left to the next norm.

        Asked before the tensor exists, so the hidden size is that of the model's first reduction, and bf16 stands
        for both served types. A wrong guess costs speed only: ``reduce_and_norm`` looks again.
        """
        hidden = self._hidden or self.kernels.workspaces[capture.EAGER].max_hidden
        return rows > 0 and self.choose(FUSED, rows, hidden, torch.bfloat16).method != STOCK

    def takes_fused(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether ``all_reduce_rms_norm`` serves these tensors; what it refuses is counted."""
        decision = gate.fused(x, residual, weight)
        if decision and not (x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()):
            decision = gate.Decision(False, "a tensor is not contiguous")
        if decision:
            choice = self.choose(FUSED, x.shape[0], x.shape[1], x.dtype)
            if choice.method in OURS:
                return True
            decision = gate.Decision(False, "the table or the kernels refuse the fused form", choice.reason)
        fallbacks.record(PATH, f"fused norm: {decision.reason}", detail=decision.detail)
        return False

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, new residual) as new tensors; the inputs stay as they are.

        Upstream's capture of auxiliary hidden states keeps a reference to the residual where a fused norm is
        announced, and counts on it not being written.

        Raises:
            PeerTimeout: as in ``all_reduce``.
        """
        choice = self.choose(FUSED, x.shape[0], x.shape[1], x.dtype)
        workspace = self._count(FUSED, choice.method)
        return self.kernels.all_reduce_rms_norm(
            gate.aligned(x),
            gate.aligned(residual),
            gate.aligned(weight),
            eps,
            workspace=workspace,
            variant=_variant(choice),
            limit_s=self._limit(workspace),
        )

    def _count(self, kind: str, method: str) -> str:
        """Count a launch made now, and name its workspace."""
        workspace = capture.workspace(self.device)
        self.calls[kind, method] += 1
        self.places[workspace, kind, method] += 1
        return workspace

    def launches(self) -> dict[str, int]:
        """Launches so far as JSON: ``"target fused packets": 24``, where a replay of a graph counts for nothing."""
        return {" ".join(place): count for place, count in sorted(self.places.items())}

    def _limit(self, workspace: str) -> float:
        # A captured limit would end a replay that waits for a rank compiling a kernel: there the watch decides.
        return self.wait_s if workspace == capture.EAGER else 0.0

    def describe(self) -> list[tuple[str, str]]:
        """Lines for a person: kernels, table, launches so far."""
        counts = ", ".join(f"{kind} {method} {n}" for (kind, method), n in sorted(self.calls.items()))
        return [*self.kernels.describe(), *self.table.describe(), ("launches", counts or "none")]


_VARIANTS = {ONE_SHOT: Variant.ONE_SHOT, TWO_STAGE: Variant.TWO_STAGE, PACKETS: Variant.PACKETS}


def _variant(choice: Choice) -> Variant:
    return _VARIANTS[choice.method]
