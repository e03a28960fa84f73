"""What is measured: every way to reduce a message on this machine, as functions of one tensor.

A method is ours or upstream's, plain or followed by residual add and RMSNorm. Methods that this machine cannot run
say why instead of being left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.distributed.one_shot import settings
from sglang.srt.distributed.one_shot.kernels import OneShotKernels
from sglang.srt.distributed.one_shot.patterns import rms_reference
from sglang.srt.distributed.one_shot.policy import FUSED, ONE_SHOT, PACKETS, PLAIN, TWO_STAGE
from sglang.srt.distributed.one_shot.protocol import Variant

#: Upstream's ways; in the table they become ``stock``.
NCCL, CUSTOM, GLOO = "nccl", "custom", "gloo"
EPS = 1e-6
#: With programmatic dependent launch, whatever the setting says; the rows beside them are without.
ONE_SHOT_PDL, PACKETS_PDL = "one-shot-pdl", "packets-pdl"
_DEPENDENT = {ONE_SHOT: ONE_SHOT_PDL, PACKETS: PACKETS_PDL}
#: Captured launches of a bench belong to the workspace of target graphs.
WORKSPACE = "target"

Step = Callable[[torch.Tensor], None]


@dataclass
class Method:
    """One way to reduce.

    Attributes:
        name: ``one-shot``, ``packets``, both with ``-pdl``, ``packets/SHAPE``, ``two-stage``, ``nccl``, ``custom`` or
            ``gloo``.
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


@dataclass(frozen=True)
class Way:
    """How kernels of this fork are launched: variant, with dependent launch or not, shape of calls in packets."""

    variant: Variant
    dependent: bool = False
    shape: int = 0


def ours(
    kernels: OneShotKernels | None, missing: str, workspace: str = WORKSPACE, shapes: Sequence[int] = ()
) -> list[Method]:
    """The ways of this fork; with dependent launch only where kernels are launched (not over simulated peers).

    ``shapes``: of calls in packets, to be measured beside the default. Up to 8 they are CTAs a row of the fused form,
    from 32 threads a CTA of the plain one.
    """
    launched = hasattr(kernels, "dependent_launch")
    ways = {ONE_SHOT: Way(Variant.ONE_SHOT), PACKETS: Way(Variant.PACKETS)}
    if launched:
        ways[ONE_SHOT_PDL] = Way(Variant.ONE_SHOT, dependent=True)
        ways[PACKETS_PDL] = Way(Variant.PACKETS, dependent=True)
        ways |= {f"{PACKETS}/{shape}": Way(Variant.PACKETS, shape=shape) for shape in shapes}
    ways[TWO_STAGE] = Way(Variant.TWO_STAGE, settings.dependent_launch())
    found = []
    for name, way in ways.items():
        for kind in (PLAIN, FUSED):
            if way.shape and (way.shape < 32) != (kind == FUSED):
                continue
            if kernels is None:
                found.append(Method(name, kind, "fork", missing=missing))
                continue
            make = _plain if kind == PLAIN else _fused
            found.append(Method(name, kind, "fork", make(kernels, way, workspace)))
    return found


def table_name(method: str) -> str:
    """The measured way that stands for a way of the table: a server launches as the setting says."""
    return _DEPENDENT.get(method, method) if settings.dependent_launch() else method


def variant_of(method: str) -> Variant:
    """The kernels' variant of one of our ways."""
    name = method.partition("/")[0].removesuffix("-pdl")
    return {PACKETS: Variant.PACKETS, TWO_STAGE: Variant.TWO_STAGE}.get(name, Variant.ONE_SHOT)


def _launch_as(kernels: Any, way: Way) -> None:
    if hasattr(kernels, "dependent_launch"):
        kernels.dependent_launch, kernels.packet_shape = way.dependent, way.shape


def _plain(kernels: OneShotKernels, way: Way, workspace: str) -> Callable[[torch.Tensor], Step]:
    def prepare(x: torch.Tensor) -> Step:
        out = torch.empty_like(x)

        def step(message: torch.Tensor) -> None:
            _launch_as(kernels, way)
            kernels.all_reduce(message, out=out, workspace=workspace, variant=way.variant)

        return step

    return prepare


def _fused(kernels: OneShotKernels, way: Way, workspace: str) -> Callable[[torch.Tensor], Step]:
    def prepare(x: torch.Tensor) -> Step:
        residual, weight = norm_operands(x)
        out, kept = torch.empty_like(x), torch.empty_like(x)

        def step(message: torch.Tensor) -> None:
            _launch_as(kernels, way)
            kernels.all_reduce_rms_norm(
                message,
                residual,
                weight,
                EPS,
                out=out,
                residual_out=kept,
                workspace=workspace,
                variant=way.variant,
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
