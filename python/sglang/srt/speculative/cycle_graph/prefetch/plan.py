"""What is asked for at which point of a pass: pure functions over weights in the order they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.speculative.cycle_graph.prefetch.kernel import MOST_BYTES, UNIT


@dataclass(frozen=True)
class Weight:
    """A weight as bytes.

    Attributes:
        name: for logs and tests.
        memory: uint8 [size], a view of the model's own tensor.
    """

    name: str
    memory: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Bytes [start, start + memory.numel()) of a weight; both are whole units."""

    name: str
    start: int
    memory: torch.Tensor


@dataclass(frozen=True)
class Point:
    """A place in a pass, and the weights that are read between it and the next one, in order."""

    name: str
    reads: tuple[Weight, ...]


def weight_of(name: str, tensor: object) -> tuple[Weight | None, str]:
    """A tensor of the model as bytes; or None and why it is left alone.

    Only matrices of two or four bytes a value, as they lie there: what a quantised product reads, and in which order,
    is its kernel's business.
    """
    if not isinstance(tensor, torch.Tensor):
        return None, "a weight is missing"
    if tensor.dim() != 2 or not tensor.dtype.is_floating_point or tensor.dtype.itemsize not in (2, 4):
        return None, "a weight is not a matrix of plain values"
    if not tensor.is_contiguous() or tensor.data_ptr() % UNIT:
        return None, "a weight's rows are not dense"
    memory = tensor.detach().view(-1).view(torch.uint8)
    return Weight(name, memory[:MOST_BYTES]), ""


def choose(points: Sequence[Point], most: int) -> dict[str, tuple[Part, ...]]:
    """What to ask for at each point, so that never more than ``most`` bytes are asked for and not read yet.

    At a point everything that is read before it has been read; the next weights are filled up in their order. No byte
    is asked for twice.

    Args:
        points: of one pass, in order.
        most: bytes.
    """
    asked: dict[str, int] = {}
    plan: dict[str, tuple[Part, ...]] = {}
    for i, point in enumerate(points):
        ahead = [weight for later in points[i:] for weight in later.reads]
        left = most - sum(asked.get(weight.name, 0) for weight in ahead)
        parts = []
        for weight in ahead:
            start = asked.get(weight.name, 0)
            size = max(0, min(left, weight.memory.numel() - start)) // UNIT * UNIT
            if size:
                parts.append(Part(weight.name, start, weight.memory[start : start + size]))
                asked[weight.name] = start + size
                left -= size
        plan[point.name] = tuple(parts)
    return plan
