"""Where a draft of Llama's form goes into small kernels, and hooks at those places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.prefetch.branch import Branch
from sglang.srt.speculative.cycle_graph.prefetch.plan import Part, Point, Weight, choose, weight_of

# Points of the cycle's parent graph: behind the verify, and behind the draft extend for the next cycle's draft.
VERIFIED, EXTENDED = "verified", "extended"


@dataclass(frozen=True)
class Place:
    """A point of the pass, the module that it stands before, and the weights read until the next."""

    point: str
    module: torch.nn.Module
    reads: tuple[tuple[str, Any], ...]


class Prefetch:
    """The plan of one draft and its hooks.

    Attributes:
        branch: that launches.
        plan: parts by point.
        skipped: reasons for weights that are left alone.
    """

    def __init__(self, model: Any, most: int, branch: Branch) -> None:
        """Read a loaded draft.

        Args:
            model: upstream's EAGLE-3 draft.
            most: bytes that may be asked for and not read yet.
            branch: launches the requests.

        Raises:
            AttributeError: the draft is not of Llama's form.
        """
        self.branch = branch
        self.skipped: list[str] = []
        self._end: torch.nn.Module = model.logits_processor
        self._places = places(model)
        self._handles: list[Any] = []
        points = [Point(place.point, self._weights(place.reads)) for place in self._places]
        packed = self._weights((("fc", getattr(getattr(model.model, "fc", None), "weight", None)),))
        self.plan: dict[str, tuple[Part, ...]] = choose(points, most)
        self.plan[VERIFIED] = choose([Point(VERIFIED, packed), *points], most)[VERIFIED]
        self.plan[EXTENDED] = choose([Point(EXTENDED, ()), *points], most)[EXTENDED]

    def ask(self, point: str) -> None:
        """Ask for what the plan holds at a point of the cycle."""
        self.branch.ask(point, self.plan[point])

    def bytes(self) -> dict[str, int]:
        """Bytes asked for, by point."""
        return {point: sum(part.memory.numel() for part in parts) for point, parts in self.plan.items()}

    def install(self) -> None:
        """Hooks before the module of every point, and behind the pass's last one."""
        for place in self._places:
            self._handles.append(
                place.module.register_forward_pre_hook(partial(_before, self.ask, place.point))
            )
        self._handles.append(self._end.register_forward_hook(partial(_behind, self.branch.join)))

    def remove(self) -> None:
        """Take all hooks out again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _weights(self, reads: tuple[tuple[str, Any], ...]) -> tuple[Weight, ...]:
        found = []
        for name, tensor in reads:
            weight, reason = weight_of(name, tensor)
            if weight is None:
                self.skipped.append(reason)
            else:
                found.append(weight)
        return tuple(found)


def places(model: Any) -> list[Place]:
    """The points of a pass in order: before the first norms, the attention and the activation of every layer, and
    before the last norm.

    Raises:
        AttributeError: a module of Llama's form is missing.
    """
    found = []
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        found += [
            Place(f"layer {i}", layer, ((f"qkv {i}", _weight(attention.qkv_proj)),)),
            Place(
                f"attention {i}",
                attention.attn,
                ((f"o {i}", _weight(attention.o_proj)), (f"gate_up {i}", _weight(mlp.gate_up_proj))),
            ),
            Place(f"activation {i}", mlp.act_fn, ((f"down {i}", _weight(mlp.down_proj)),)),
        ]
    return [*found, Place("norm", model.model.norm, (("head", _weight(model.lm_head)),))]


def _weight(module: Any) -> Any:
    return getattr(module, "weight", None)


def _before(ask: Callable[[str], None], point: str, *unused: Any) -> None:
    if not torch.compiler.is_compiling():
        ask(point)


def _behind(join: Callable[[], None], *unused: Any) -> None:
    if not torch.compiler.is_compiling():
        join()
