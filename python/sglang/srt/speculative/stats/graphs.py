"""Which passes of a cycle replayed a graph, and why the others did not.

A pass that falls off its graph is silent upstream and feeds itself: the batch that is one too large decodes
slower, so it stays large. Every eager pass is therefore counted with its reason, and the first of each kind
is a warning with the flag to change.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.graph_policy import steps
from sglang.srt.speculative.graph_policy.capture import why_absent
from sglang.srt.speculative.graph_policy.facts import explain, kind_of
from sglang.srt.speculative.graph_policy.reasons import Eager

CYCLE_PASSES = ("draft", "verify", "draft_extend")


class GraphLog:
    """Counts of one process. A pass is asked more than once whether it may replay; it counts once a step."""

    def __init__(self) -> None:
        self.replays: dict[str, int] = {}
        self.eager: dict[str, int] = {}
        self._replayed: set[str] = set()
        self._refused: dict[str, Eager] = {}

    def begin(self) -> None:
        """A step begins."""
        self._replayed.clear()
        self._refused.clear()

    def replay(self, name: str) -> None:
        """The pass ``name`` replays its graph."""
        self._replayed.add(name)
        self.replays[name] = self.replays.get(name, 0) + 1
        steps.replayed(name)

    def replay_whole(self, name: str) -> None:
        """All passes of the step replay as the one graph ``name``."""
        self._replayed.update(CYCLE_PASSES)
        self.replays[name] = self.replays.get(name, 0) + 1
        steps.replayed(name)

    def refuse(self, name: str, reason: str, detail: str) -> None:
        """The graph of ``name`` cannot serve this batch."""
        self._refused[name] = Eager(reason, detail)

    def end(self, passes: tuple[str, ...]) -> None:
        """The step ended; what it ran without a graph is counted as eager."""
        for name in passes:
            if name not in self._replayed:
                self.eager[name] = self.eager.get(name, 0) + 1
                steps.eager(name, self._refused.get(name) or why_absent(name))


def name_of(runner: Any) -> str:
    """The pass that a graph runner serves."""
    return kind_of(runner)


def why_not(runner: Any, batch: Any) -> tuple[str, str]:
    """Why a runner refused a batch, in words: reason without numbers, and detail with them and the remedy."""
    why = explain(runner, batch)
    return why.reason, why.detail
