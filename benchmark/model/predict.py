"""Cycles from parts: upstream's and the fork's, at any context."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from sglang.bench_verify.slice.shapes import NAMED, rank_slice
from sglang.srt.speculative.stats.breakeven import Verdict, judge

from benchmark.model import constants as c
from benchmark.model.hardware import MACHINES, Curve
from benchmark.model.parts import INT4, Deployment, Part, draft_forward, forward, total_ms


@dataclass(frozen=True)
class Path:
    """What runs: which attention a verify uses, which all-reduce, how much host time is left between graphs."""

    name: str
    split_verify: bool
    fused_reduce: bool
    idle_us: float
    eager_kernels: float


UPSTREAM = Path("upstream", False, False, c.CYCLE_IDLE_US.value, c.CYCLE_EAGER_KERNELS.value)
# The fork's cycle: its own verify attention; all-reduce and host time as upstream's until they are measured.
FORK_ATTENTION = Path("fork, attention only", True, False, c.CYCLE_IDLE_US.value, c.CYCLE_EAGER_KERNELS.value)
FORK = Path("fork, attention and all-reduce", True, True, c.CYCLE_IDLE_US.value, c.CYCLE_EAGER_KERNELS.value)
FLOOR = Path("one graph a cycle", True, True, c.DECODE_IDLE_US.value, 0.0)
PATHS = (UPSTREAM, FORK_ATTENTION, FORK, FLOOR)


@dataclass
class Prediction:
    """Predicted milliseconds of one case."""

    machine: str
    path: str
    context: int
    drafted: int
    decode_ms: float
    phases_ms: dict[str, float]
    verify_parts_ms: dict[str, float] = field(default_factory=dict)

    @property
    def cycle_ms(self) -> float:
        """A whole cycle."""
        return sum(self.phases_ms.values())

    def verdict(self, kept: float) -> Verdict:
        """Break-even at an accept length."""
        return judge(self.cycle_ms, self.decode_ms, kept)


def kimi(machine: str, repeat: float = 0.0) -> Deployment:
    """Kimi-K2.5 with INT4 experts on a machine of ``MACHINES``."""
    return Deployment(NAMED["kimi-k2.5"], MACHINES[machine], INT4, c.MOE_EFFICIENCY_MARLIN.value, repeat)


def reference_slice(experts_of_a_token: bool = True) -> Deployment:
    """The one-rank slice of the reference figures, on one H200.

    Its dummy weights route every token alike: a verify reads the experts of one token (``repeat`` 1).
    """
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    return Deployment(shape, MACHINES["h200"], repeat=1.0 if experts_of_a_token else 0.0)


def predict(deployment: Deployment, path: Path, context: int, drafted: int = 2, batch: int = 1) -> Prediction:
    """Predict decode and cycle.

    Args:
        context: tokens before the new ones.
        drafted: draft tokens; a verify has one more.
    """
    machine = deployment.machine
    reduce = machine.fused if path.fused_reduce else machine.nccl
    verify_attention = machine.split_verify if path.split_verify else machine.serial_verify
    decode = forward(deployment, 1, context, machine.decode_attention, reduce, batch)
    verify = forward(deployment, drafted + 1, context, verify_attention, reduce, batch)
    wide = draft_curve(machine.decode_attention)
    step = draft_forward(deployment, context, wide, reduce, extend=False)
    # Draft extend takes the prefill kernel whatever verifies, unless the fork's serves it too.
    extend = draft_forward(
        deployment, context, wide if path.split_verify else verify_attention, reduce, extend=True
    )
    phases = {
        "draft": (drafted - 1) * total_ms(step, machine) if drafted > 1 else 0.0,
        "verify": total_ms(verify, machine),
        "draft_extend": total_ms(extend, machine),
        "eager": path.eager_kernels * machine.kernel_us / 1e3,
        "host": path.idle_us / 1e3,
    }
    return Prediction(
        machine=machine.name,
        path=path.name,
        context=context,
        drafted=drafted,
        decode_ms=total_ms(decode, machine) + c.DECODE_IDLE_US.value / 1e3,
        phases_ms=phases,
        verify_parts_ms=named(verify, deployment),
    )


def draft_curve(curve: Curve) -> Curve:
    """Attention of the draft: 8 heads of keys and values of 128 are 3.6 times the bytes of one latent of 576."""
    return dataclasses.replace(curve, per_unit=curve.per_unit * (2 * 8 * 128) / 576)


def named(parts: list[Part], deployment: Deployment) -> dict[str, float]:
    """Milliseconds by part name."""
    return {part.name: part.time_us(deployment.machine) / 1e3 for part in parts}
