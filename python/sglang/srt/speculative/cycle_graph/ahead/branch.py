"""A second branch of the target's verify: fork where the last packed state is known, join at the pass's end.

Installed as PyTorch hooks on one layer of the target, for the time of the captures only; the graphs keep what was
captured, and eager passes never see a hook.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.ahead.projection import Projection

STATES = "captured_last_layer_outputs"


class Branch:
    """Projects the packed states of a verify into ``projected`` beside the rest of the pass.

    Args:
        projection: of the draft.
        rows: most rows of a verify that is served; larger ones are left alone.
        states: how many of the target's layers leave a state.
        dtype: of the states.
        device: where they are.
        programs: thread blocks of the projection on a GPU.
    """

    def __init__(
        self,
        projection: Projection,
        rows: int,
        states: int,
        dtype: torch.dtype,
        device: torch.device | str,
        programs: int,
    ) -> None:
        self.projection, self.rows, self.states, self.programs = projection, rows, states, programs
        self.projected = torch.zeros(rows, projection.width, dtype=dtype, device=device)
        self.stream: Any = torch.cuda.Stream(device) if self.projected.is_cuda else None  # type: ignore[no-untyped-call]
        # Sizes (in rows) whose pass was joined at its end, so that its graph holds the projection.
        self.joined: set[int] = set()
        self._collected: Any = None
        self._held: list[Any] = []
        self._rows = 0
        self._handles: list[Any] = []
        self._tails: list[Any] | None = None

    def install(self, layer: Any, tails: list[Any]) -> None:
        """Hook into ``layer``, the last that leaves a state, and into upstream's list of hooks at a capture's end."""
        self._handles = [layer.register_forward_pre_hook(self._enter, with_kwargs=True)]
        # A layer hands its state over before its attention runs; where that is no module of its own, after the layer.
        attention = getattr(layer, "self_attn", None)
        if isinstance(attention, torch.nn.Module):
            self._handles.append(attention.register_forward_pre_hook(self._fork_if_known))
        self._handles.append(layer.register_forward_hook(self._fork_if_known))
        self._tails = tails
        tails.append(self.tail)

    def remove(self) -> None:
        """Take all hooks out again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._tails is not None:
            self._tails.remove(self.tail)
            self._tails = None

    def tail(self, runner: Any, out: Any, forward_batch: Any, rows: int) -> None:
        """At the end of a pass that may be under capture: the main stream waits for the projection."""
        self._collected = None
        if not self._held:
            return
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self._held.clear()
        if self._rows == rows:
            self.joined.add(rows)

    def _enter(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._held:
            # An eager pass that upstream runs without its hooks at the end; no capture is under way here.
            if self.stream is not None:
                self.stream.synchronize()
            self._held.clear()
        mode = next(
            (value.forward_mode for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode")),
            None,
        )
        verify = mode is not None and mode.is_target_verify()
        self._collected = kwargs.get(STATES) if verify else None

    def _fork_if_known(self, *unused: Any) -> None:
        collected = self._collected
        if collected is None or len(collected) != self.states:
            return
        self._collected = None
        if self.stream is None:
            self._project(collected)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._project(collected)

    def _project(self, collected: Any) -> None:
        finalize = getattr(collected, "finalize", None)
        packed = finalize() if finalize is not None else torch.cat(list(collected), dim=-1)
        self._rows = int(packed.shape[0])
        # Held until the join: nothing else may be given this memory while the other stream reads it.
        self._held = [collected, packed]
        if 0 < self._rows <= self.rows:
            self.projection.into(packed, self.projected[: self._rows], self.programs)
        else:
            self._rows = -1


def last_layer(model: Any) -> tuple[Any, int]:
    """The last layer of a target that leaves a state, and how many do; (None, 0) where none does."""
    for module in model.modules():
        captured, layers = getattr(module, "layers_to_capture", None), getattr(module, "layers", None)
        if captured and layers is not None and max(captured) < len(layers):
            return layers[max(captured)], len(captured)
    return None, 0
