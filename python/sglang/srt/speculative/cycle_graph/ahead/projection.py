"""What a draft does with the target's packed states before its first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Projection:
    """Norms where the draft has them, then one linear map.

    Attributes:
        weight: [H, A]; the draft's own tensor, read where it is.
        bias: [H] or None.
        whole: norm over the packed row, or None.
        each: norms over the row's equal parts, or empty.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    whole: Any = None
    each: tuple[Any, ...] = ()

    @property
    def width(self) -> int:
        """Columns of the result (H)."""
        return int(self.weight.shape[0])

    def prepare(self, packed: torch.Tensor) -> torch.Tensor:
        """The packed rows [R, A] as the linear map reads them."""
        if self.whole is not None:
            packed = self.whole(packed)
        if self.each:
            parts = packed.chunk(len(self.each), dim=-1)
            packed = torch.cat([norm(part) for norm, part in zip(self.each, parts, strict=True)], dim=-1)
        return packed

    def into(self, packed: torch.Tensor, out: torch.Tensor, programs: int) -> None:
        """Project ``packed`` [R, A] into ``out`` [R, H]; ``programs`` thread blocks on a GPU."""
        rows = self.prepare(packed)
        if rows.is_cuda:
            from sglang.srt.speculative.cycle_graph.ahead.kernel import project_rows

            project_rows(rows, self.weight, self.bias, out, programs)
        else:
            out.copy_(functional.linear(rows, self.weight, self.bias))


def projection_of(model: Any, packed: int) -> tuple[Projection | None, str]:
    """The projection of a draft model, or None and why there is none that can be made ahead.

    Args:
        model: upstream's EAGLE-3 draft, whose inner ``model`` holds ``fc``.
        packed: columns of the packed states.
    """
    inner = getattr(model, "model", None)
    linear = getattr(inner, "fc", None)
    weight = getattr(linear, "weight", None)
    if inner is None or weight is None:
        return None, "the draft has no projection of packed states"
    if weight.dim() != 2 or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return None, "the draft's projection is quantised"
    hidden = int(inner.config.hidden_size)
    if tuple(weight.shape) != (hidden, packed):
        return None, "the draft's projection is divided over the ranks"
    if packed == hidden:
        return None, "the draft tells packed states from its own by their width, and the two are equal"
    whole, each = getattr(inner, "input_norm", None), getattr(inner, "fc_norm", None)
    bias = getattr(linear, "bias", None)
    return Projection(weight, bias if isinstance(bias, torch.Tensor) else None, whole, tuple(each or ())), ""
