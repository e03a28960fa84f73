"""A forward pass as a list of parts: kernels and bytes of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.bench_verify.slice.shapes import Shape
from sglang.bench_verify.slice.union import correlated_union

from benchmark.model import constants as c
from benchmark.model.hardware import Curve, Knots, Machine

BF16 = 2.0
# INT4 weights in groups of 32 with one bf16 scale each.
INT4 = 0.5 + 2.0 / 32.0


@dataclass(frozen=True)
class Part:
    """One kind of work of a pass.

    Attributes:
        name: attention, projections, experts, shared, router, glue, head, all_reduce.
        kernels: launches of it in the pass.
        bytes: bytes it reads and writes.
        efficiency: share of the copy bandwidth it reaches.
        latency_us: further fixed time of all its kernels together.
        us: time that follows from a curve instead (attention, all-reduce); then kernels and bytes only inform.
    """

    name: str
    kernels: float
    bytes: float = 0.0
    efficiency: float = 1.0
    latency_us: float = 0.0
    us: float | None = None

    def time_us(self, machine: Machine) -> float:
        """Microseconds on ``machine``."""
        if self.us is not None:
            return self.us
        return (
            self.latency_us
            + self.kernels * machine.kernel_us
            + self.bytes / (machine.bandwidth * self.efficiency) * 1e6
        )


@dataclass(frozen=True)
class Deployment:
    """A model on a machine.

    Attributes:
        shape: the full model, or a slice with ``ranks=1``.
        expert_bytes: bytes an expert weight.
        moe_efficiency, moe_latency_us: see ``constants``; the latency is that of one expert GEMM.
        repeat: excess chance that a token repeats an expert of the token before it (0 = independent routing).
        eager_reduce: whether the norm after an all-reduce is a kernel of its own.
    """

    shape: Shape
    machine: Machine
    expert_bytes: float = BF16
    moe_efficiency: float = c.MOE_EFFICIENCY_TRITON.value
    moe_latency_us: float = c.MOE_LATENCY_TRITON_US.value
    repeat: float = 0.0

    @property
    def ranks(self) -> int:
        """Ranks that the shape is divided among."""
        return self.machine.ranks


def kernels_per_layer(deployment: Deployment, tokens: int) -> dict[str, float]:
    """Launches of a MoE layer, attention and all-reduce apart, as read from upstream's source.

    Two norms with add, two small norms, fused q_a/kv_a, q_b, two absorbed bmm, rope, two cats, KV write, copies,
    o_proj, router, gate, shared expert (3 and an add), routed experts: 2 GEMMs and in bf16 4 more, in INT4 5 (one
    token) or 6 (more).
    """
    routing = 4.0 if deployment.expert_bytes == BF16 else (5.0 if tokens == 1 else 6.0)
    return {
        "glue": 11.0,
        "projections": 5.0,
        "router": 2.0,
        "shared": 4.0,
        "experts": 2.0,
        "routing": routing,
    }


def forward(
    deployment: Deployment, tokens: int, context: int, attention: Curve | Knots, reduce: Curve, batch: int = 1
) -> list[Part]:
    """One pass of the target over ``tokens`` tokens of each of ``batch`` requests with ``context`` tokens before them."""
    shape, ranks = deployment.shape, deployment.ranks
    moe_layers = shape.layers - shape.dense_layers
    heads, width = shape.heads / ranks, shape.expert_width / ranks
    rows = tokens * batch
    launches = kernels_per_layer(deployment, tokens)
    replicated = shape.hidden * (shape.query_rank + shape.latent + shape.rope)
    split = (
        shape.query_rank * heads * (shape.nope + shape.rope)
        + heads * shape.latent * (shape.nope + shape.value)
        + heads * shape.value * shape.hidden
    )
    union = correlated_union(shape.experts, shape.experts_per_token, rows, deployment.repeat)
    expert = 3 * shape.hidden * width
    message_kb = rows * shape.hidden * BF16 / 1024
    dense = c.DENSE_EFFICIENCY.value
    parts = [
        Part(
            "projections",
            shape.layers * launches["projections"],
            shape.layers * (replicated + split) * BF16,
            dense,
        ),
        Part("attention", 2 * shape.layers, us=shape.layers * batch_attention(attention, context, batch)),
        Part(
            "experts",
            moe_layers * launches["experts"],
            moe_layers * union * expert * deployment.expert_bytes,
            deployment.moe_efficiency,
            latency_us=moe_layers * launches["experts"] * deployment.moe_latency_us,
        ),
        Part("routing", moe_layers * launches["routing"]),
        Part(
            "shared",
            moe_layers * launches["shared"],
            moe_layers * shape.shared_experts * expert * BF16,
            dense,
        ),
        Part(
            "router", moe_layers * launches["router"], moe_layers * shape.hidden * shape.experts * BF16, dense
        ),
        Part(
            "dense layers",
            3.0 * shape.dense_layers,
            shape.dense_layers * 3 * shape.hidden * shape.dense_width / ranks * BF16,
            dense,
        ),
        Part("glue", shape.layers * launches["glue"]),
        Part("head", c.KERNELS_OF_SAMPLING.value, shape.hidden * shape.vocabulary / ranks * BF16, dense),
    ]
    if ranks > 1:
        parts.append(
            Part("all_reduce", 2.0 * shape.layers + 1, us=(2.0 * shape.layers + 1) * reduce.us(message_kb))
        )
    return parts


def batch_attention(attention: Curve | Knots, context: int, batch: int) -> float:
    """Attention of one layer: requests of a batch share the fixed part and add up their contexts."""
    return attention.us(batch * context / 1000.0)


def draft_forward(
    deployment: Deployment,
    context: int,
    attention: Curve,
    reduce: Curve,
    extend: bool,
    batch: int = 1,
) -> list[Part]:
    """One pass of a one-layer Llama draft over ``batch`` requests; ``extend`` also runs the layer that joins three target states.

    That layer is replicated on every rank: 21,504 x 7,168 weights for Kimi's width.
    """
    shape, ranks = deployment.shape, deployment.ranks
    heads = max(8.0, shape.heads / ranks)
    attention_weights = 2 * shape.hidden * 3 * heads * 128 + heads * 128 * shape.hidden
    mlp = 3 * shape.hidden * shape.dense_width / ranks
    head = shape.hidden * shape.vocabulary / ranks / 5
    join = 3 * shape.hidden * shape.hidden if extend else 0
    dense = c.DENSE_EFFICIENCY.value
    parts = [
        Part("draft weights", 10.0, (attention_weights + mlp + head + join) * BF16, dense),
        Part("draft glue", 8.0),
        Part("draft attention", 2.0, us=batch_attention(attention, context, batch)),
    ]
    if ranks > 1:
        message_kb = batch * (3 if extend else 1) * shape.hidden * BF16 / 1024
        parts.append(Part("draft all_reduce", 3.0, us=3.0 * reduce.us(message_kb)))
    return parts


def total_ms(parts: list[Part], machine: Machine) -> float:
    """Milliseconds of a list of parts."""
    return sum(part.time_us(machine) for part in parts) / 1e3
