"""The cycle as a sequence of steps and passes."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.speculative.cycle_graph.buffers import CycleBuffers


class Glue(Protocol):
    """The steps between the passes; ``steps`` (PyTorch) and ``kernels`` (Triton) both are one."""

    def begin(self, buffers: CycleBuffers) -> None:
        """Relay to draft inputs."""

    def verify_inputs(self, buffers: CycleBuffers) -> None:
        """Bonus and drafts to the rows of the verify."""

    def accept(self, buffers: CycleBuffers) -> None:
        """Logits to accepted tokens, results, lengths and draft-extend inputs."""

    def relay(self, buffers: CycleBuffers) -> None:
        """Draft-extend outputs to the relay."""


class Passes(Protocol):
    """The three model passes over the static buffers."""

    def draft(self) -> None:
        """Propose S tokens a request."""

    def verify(self) -> None:
        """Score W rows a request with the target."""

    def extend(self) -> None:
        """Let the draft read the accepted rows."""


def run(buffers: CycleBuffers, glue: Glue, passes: Passes) -> None:
    """One cycle, after ``load`` has set ``buffers.control``. On a GPU this is what gets captured."""
    glue.begin(buffers)
    passes.draft()
    glue.verify_inputs(buffers)
    passes.verify()
    glue.accept(buffers)
    passes.extend()
    glue.relay(buffers)
