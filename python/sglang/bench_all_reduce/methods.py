"""What is measured: every way to reduce a message on this machine, as functions of one tensor.

A method is ours or upstream's, plain or followed by residual add and RMSNorm. Methods that this machine cannot run
say why instead of being left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.distributed.one_shot import settings
from sglang.srt.distributed.one_shot.kernels import OneShotKernels
from sglang.srt.distributed.one_shot.patterns import rms_reference
from sglang.srt.distributed.one_shot.policy import FUSED, ONE_SHOT, PLAIN, TWO_STAGE
from sglang.srt.distributed.one_shot.protocol import Variant

#: Upstream's ways; in the table they become ``stock``.
NCCL, CUSTOM, GLOO = "nccl", "custom", "gloo"
EPS = 1e-6
#: One-shot with programmatic dependent launch, whatever the setting says; the row beside it is without.
ONE_SHOT_PDL = "one-shot-pdl"
#: Captured launches of a bench belong to the workspace of target graphs.
WORKSPACE = "target"

Step = Callable[[torch.Tensor], None]


@dataclass
class Method:
    """One way to reduce.

    Attributes:
        name: ``one-shot``, ``one-shot-pdl``, ``two-stage``, ``nccl``, ``custom`` or ``gloo``.
        kind: ``plain`` or ``fused`` (for upstream's: reduction, add and norm as separate kernels).
        variant: ``fork`` or ``upstream``.
        prepare: makes the step for tensors of one shape.
        session: around a CUDA graph capture.
        missing: why it cannot run here; then ``prepare`` is not called.
    """

    name: str
    kind: str
    variant: str
    prepare: Callable[[torch.Tensor], Step] = lambda x: lambda y: None
    session: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    missing: str = ""


def norm_operands(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and weight for a message."""
    return torch.ones_like(x), torch.ones_like(x[0])


def ours(kernels: OneShotKernels | None, missing: str, workspace: str = WORKSPACE) -> list[Method]:
    """The ways of this fork; with dependent launch only where kernels are launched (not over simulated peers)."""
    ways = [(ONE_SHOT, Variant.ONE_SHOT, False), (TWO_STAGE, Variant.TWO_STAGE, settings.dependent_launch())]
    if hasattr(kernels, "dependent_launch"):
        ways.insert(1, (ONE_SHOT_PDL, Variant.ONE_SHOT, True))
    found = []
    for name, variant, dependent in ways:
        for kind in (PLAIN, FUSED):
            if kernels is None:
                found.append(Method(name, kind, "fork", missing=missing))
                continue
            make = _plain if kind == PLAIN else _fused
            found.append(Method(name, kind, "fork", make(kernels, variant, workspace, dependent)))
    return found


def table_name(method: str) -> str:
    """The measured way that stands for a way of the table: a server launches as the setting says."""
    return ONE_SHOT_PDL if method == ONE_SHOT and settings.dependent_launch() else method


def _launch_as(kernels: Any, dependent: bool) -> None:
    if hasattr(kernels, "dependent_launch"):
        kernels.dependent_launch = dependent


def _plain(
    kernels: OneShotKernels, variant: Variant, workspace: str, dependent: bool
) -> Callable[[torch.Tensor], Step]:
    def prepare(x: torch.Tensor) -> Step:
        out = torch.empty_like(x)

        def step(message: torch.Tensor) -> None:
            _launch_as(kernels, dependent)
            kernels.all_reduce(message, out=out, workspace=workspace, variant=variant)

        return step

    return prepare


def _fused(
    kernels: OneShotKernels, variant: Variant, workspace: str, dependent: bool
) -> Callable[[torch.Tensor], Step]:
    def prepare(x: torch.Tensor) -> Step:
        residual, weight = norm_operands(x)
        out, kept = torch.empty_like(x), torch.empty_like(x)

        def step(message: torch.Tensor) -> None:
            _launch_as(kernels, dependent)
            kernels.all_reduce_rms_norm(
                message,
                residual,
                weight,
                EPS,
                out=out,
                residual_out=kept,
                workspace=workspace,
                variant=variant,
            )

        return step

    return prepare


def stock(
    name: str, reduce: Callable[[torch.Tensor], torch.Tensor], session: Callable[[], Any] = nullcontext
) -> list[Method]:
    """Upstream's reduction alone, and with its norm behind it."""

    def plain(x: torch.Tensor) -> Step:
        return lambda message: _drop(reduce(message))

    def with_norm(x: torch.Tensor) -> Step:
        residual, weight = norm_operands(x)
        norm = upstream_norm(x.device)
        return lambda message: norm(reduce(message), residual, weight)

    return [
        Method(name, PLAIN, "upstream", plain, session),
        Method(name, FUSED, "upstream", with_norm, session),
    ]


def absent(name: str, why: str) -> list[Method]:
    """A way of upstream that cannot run here."""
    return [Method(name, kind, "upstream", missing=why) for kind in (PLAIN, FUSED)]


def _drop(_: torch.Tensor) -> None:
    return None


def upstream_norm(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Residual add and RMSNorm as upstream runs them behind an all-reduce: one kernel on a GPU."""
    if device.type == "cuda":
        try:
            from sgl_kernel import fused_add_rmsnorm
        except ImportError:
            pass
        else:
            return lambda x, residual, weight: fused_add_rmsnorm(x, residual, weight, EPS)

    def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        residual.copy_(x.float() + residual.float())
        x.copy_(rms_reference(residual, weight, EPS))

    return plain
