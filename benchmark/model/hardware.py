"""Machines: bandwidth, kernel cost, attention curves and link."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from benchmark.model import constants as c


@dataclass(frozen=True)
class Curve:
    """``fixed`` us plus ``per_unit`` us for each unit (1,000 tokens of context, or a KB of message)."""

    fixed: float
    per_unit: float

    def us(self, units: float) -> float:
        """Microseconds."""
        return self.fixed + self.per_unit * units


@dataclass(frozen=True)
class Knots:
    """Measured points of a curve that is no line, straight between them and behind the last one.

    Attributes:
        points: (units, us), ascending; before the first the figure is that of the first.
    """

    points: tuple[tuple[float, float], ...]

    def us(self, units: float) -> float:
        """Microseconds."""
        if units <= self.points[0][0]:
            return self.points[0][1]
        pieces = list(pairwise(self.points))
        (left, low), (right, high) = next((p for p in pieces if units <= p[1][0]), pieces[-1])
        return low + (high - low) * (units - left) / (right - left)

    def scaled(self, factor: float) -> Knots:
        """The same curve on a machine that takes ``factor`` times as long."""
        return Knots(tuple((units, us * factor) for units, us in self.points))


@dataclass(frozen=True)
class Machine:
    """One deployment target.

    Attributes:
        ranks: tensor-parallel ranks.
        bandwidth: achieved bytes a second of a long copy.
        kernel_us: fixed cost of a kernel inside a graph.
        decode_attention, serial_verify, split_verify: one layer's attention by 1,000 tokens of context: upstream's
            split decode, upstream's serial verify (prefill kernel), the fork's split verify.
        draft_decode, draft_serial, draft_split: the draft's attention in a draft step, and in a draft extend by
            upstream's prefill kernel and by the fork's.
        nccl, fused: one all-reduce by KB of message: what upstream uses there, what the fork uses there.
    """

    name: str
    ranks: int
    bandwidth: float
    kernel_us: float
    decode_attention: Curve | Knots
    serial_verify: Curve
    split_verify: Curve
    draft_decode: Curve
    draft_serial: Curve
    draft_split: Curve
    nccl: Curve
    fused: Curve


_DECODE = Knots(
    (
        (1.1, c.H200_DECODE_1K_US.value),
        (16.5, c.H200_DECODE_16K_US.value),
        (65.6, c.H200_DECODE_64K_US.value),
        (131.1, c.H200_DECODE_128K_US.value),
    )
)
H200 = Machine(
    name="H200",
    ranks=1,
    bandwidth=c.H200_BANDWIDTH.value,
    kernel_us=c.H200_KERNEL_US.value,
    decode_attention=_DECODE,
    serial_verify=Curve(c.H200_SERIAL_FIXED_US.value, c.H200_SERIAL_PER_K_US.value),
    split_verify=Curve(c.H200_SPLIT_FIXED_US.value, c.H200_SPLIT_PER_K_US.value),
    draft_decode=Curve(c.H200_DRAFT_FIXED_US.value, c.H200_DRAFT_PER_K_US.value),
    draft_serial=Curve(c.H200_EXTEND_FIXED_US.value, c.H200_EXTEND_PER_K_US.value),
    draft_split=Curve(c.H200_EXTEND_FIXED_US.value, c.H200_EXTEND_SPLIT_PER_K_US.value),
    nccl=Curve(0.0, 0.0),
    fused=Curve(0.0, 0.0),
)
H200_X8 = Machine(
    name="8x H200",
    ranks=8,
    bandwidth=H200.bandwidth,
    kernel_us=H200.kernel_us,
    decode_attention=H200.decode_attention,
    serial_verify=H200.serial_verify,
    split_verify=H200.split_verify,
    draft_decode=H200.draft_decode,
    draft_serial=H200.draft_serial,
    draft_split=H200.draft_split,
    nccl=Curve(c.NVLINK_FIXED_US.value, c.NVLINK_PER_KB_US.value),
    fused=Curve(c.NVLINK_FIXED_US.value, c.NVLINK_PER_KB_US.value),
)
_CLOCKS = c.RTX_KERNEL_US.value / c.H200_KERNEL_US.value
RTX_X8 = Machine(
    name="8x RTX PRO 6000",
    ranks=8,
    bandwidth=c.RTX_BANDWIDTH.value,
    kernel_us=c.RTX_KERNEL_US.value,
    # Fixed parts are latencies of the processor; the slope of a split kernel is bandwidth.
    # Below 0.85 TB/s even at 128k: latency, not bandwidth, and so the clocks.
    decode_attention=_DECODE.scaled(_CLOCKS),
    serial_verify=Curve(c.H200_SERIAL_FIXED_US.value * _CLOCKS, c.RTX_SERIAL_PER_K_US.value),
    split_verify=Curve(c.H200_SPLIT_FIXED_US.value * _CLOCKS, c.RTX_SPLIT_PER_K_US.value),
    draft_decode=Curve(c.H200_DRAFT_FIXED_US.value * _CLOCKS, c.H200_DRAFT_PER_K_US.value * _CLOCKS),
    draft_serial=Curve(c.H200_EXTEND_FIXED_US.value * _CLOCKS, c.H200_EXTEND_PER_K_US.value * _CLOCKS),
    draft_split=Curve(
        c.H200_EXTEND_FIXED_US.value * _CLOCKS, c.H200_EXTEND_SPLIT_PER_K_US.value * 4.8 / 1.79
    ),
    nccl=Curve(c.NCCL_PCIE_FIXED_US.value, c.NCCL_PCIE_PER_KB_US.value),
    fused=Curve(c.ONE_SHOT_PCIE_FIXED_US.value, c.ONE_SHOT_PCIE_PER_KB_US.value),
)
MACHINES = {"h200": H200, "h200x8": H200_X8, "rtxpro6000x8": RTX_X8}
