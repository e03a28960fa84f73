"""Cycles from parts: upstream's and the fork's, at any context."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.bench_verify.slice.shapes import NAMED, rank_slice
from sglang.srt.speculative.stats.breakeven import Verdict, judge

from benchmark.model import constants as c
from benchmark.model.hardware import MACHINES
from benchmark.model.parts import INT4, Deployment, Part, draft_forward, forward, total_ms


@dataclass(frozen=True)
class Path:
    """What runs.

    Attributes:
        split_verify: the fork's attention in verify, draft extend and decode, in place of upstream's.
        split_draft: the fork's attention in the draft steps as well.
        fused_reduce: the fork's all-reduce.
        host_us: what the host needs for a cycle; a cycle is never shorter.
        eager_kernels: launches outside graphs.
        sample_us: accepting and what is looked at beside it, on the H200.
        glue_us: kernels of the one graph in the draft phase, on the H200.
        gap_us: between two graphs where the host is ahead.
    """

    name: str
    split_verify: bool
    split_draft: bool
    fused_reduce: bool
    host_us: float
    eager_kernels: float
    sample_us: float
    glue_us: float = 0.0
    gap_us: float = c.GRAPH_GAP_US.value


HOST, EAGER = c.HOST_CYCLE_US.value, c.CYCLE_EAGER_KERNELS.value
UPSTREAM = Path("upstream", False, False, False, HOST, EAGER, c.SAMPLE_US.value)
# The older tree of the first slice rows, and the two steps after it.
FORK_ATTENTION = Path("fork, verify attention", True, False, False, HOST, EAGER, c.SAMPLE_OPERATORS_US.value)
FORK = Path("fork, and draft, all-reduce", True, True, True, HOST, EAGER, c.SAMPLE_FORK_US.value)
ONE_GRAPH = Path(
    "fork, one graph a cycle",
    True,
    True,
    True,
    c.HOST_ONE_GRAPH_US.value,
    0.0,
    c.SAMPLE_ONE_GRAPH_US.value,
    c.GLUE_ONE_GRAPH_US.value,
    c.GAP_ONE_GRAPH_US.value,
)
PATHS = (UPSTREAM, FORK_ATTENTION, FORK, ONE_GRAPH)


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
    return Deployment(NAMED["kimi-k2.5"], MACHINES[machine], INT4, c.MOE_EFFICIENCY_MARLIN.value, 0.0, repeat)


def reference_slice(experts_of_a_token: bool = True, layers: int = 12) -> Deployment:
    """The one-rank slice of the reference figures, on one H200; 8 layers where draft lengths were compared.

    Its dummy weights route every token alike: a verify reads the experts of one token (``repeat`` 1).
    """
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=layers, experts=64)
    return Deployment(shape, MACHINES["h200"], repeat=1.0 if experts_of_a_token else 0.0)


def predict(
    deployment: Deployment,
    path: Path,
    context: int,
    drafted: int = 2,
    batch: int = 1,
    host_us: float | None = None,
) -> Prediction:
    """Predict decode and cycle.

    Args:
        context: tokens before the new ones.
        drafted: draft tokens; a verify has one more.
        host_us: what the host needs for a cycle, where that was measured; else the path's.
    """
    machine = deployment.machine
    reduce = machine.fused if path.fused_reduce else machine.nccl
    verify_attention = machine.split_verify if path.split_verify else machine.serial_verify
    # The fork's kernel serves a plain decode too: what speculation must beat gets faster with it.
    decode_attention = machine.split_verify if path.split_verify else machine.decode_attention
    decode = forward(deployment, 1, context, decode_attention, reduce, batch)
    verify = forward(deployment, drafted + 1, context, verify_attention, reduce, batch)
    step_attention = machine.draft_split if path.split_draft else machine.draft_decode
    step = draft_forward(deployment, context, step_attention, reduce, extend=False, batch=batch)
    extend_attention = machine.draft_split if path.split_verify else machine.draft_serial
    extend = draft_forward(deployment, context, extend_attention, reduce, extend=True, batch=batch)
    # Eager kernels between the graphs: a third before each.
    eager = path.eager_kernels * machine.kernel_us / 3e3
    gap = path.gap_us / 1e3
    small = machine.kernel_us / c.H200_KERNEL_US.value / 1e3
    phases = {
        "draft": (drafted - 1) * total_ms(step, machine) + path.glue_us * small + eager,
        "verify": total_ms(verify, machine) + eager,
        "sample": path.sample_us * small,
        "draft_extend": total_ms(extend, machine) + eager,
    }
    device = sum(phases.values()) + gap
    phases["host_gap"] = gap + max(0.0, (path.host_us if host_us is None else host_us) / 1e3 - device)
    return Prediction(
        machine=machine.name,
        path=path.name,
        context=context,
        drafted=drafted,
        decode_ms=max(total_ms(decode, machine) + c.GRAPH_GAP_US.value / 1e3, c.HOST_DECODE_US.value / 1e3),
        phases_ms=phases,
        verify_parts_ms=named(verify, deployment),
    )


def named(parts: list[Part], deployment: Deployment) -> dict[str, float]:
    """Milliseconds by part name."""
    return {part.name: part.time_us(deployment.machine) / 1e3 for part in parts}
