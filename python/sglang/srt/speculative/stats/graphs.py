"""Which passes of a cycle replayed a graph, and why the others did not.

A pass that falls off its graph is silent upstream and feeds itself: the batch that is one too large decodes
slower, so it stays large. Every eager pass is therefore counted with its reason, and the first of each kind
is a warning with the flag to change.
"""

from __future__ import annotations

from typing import Any

from sglang.fork import fallbacks

CYCLE_PASSES = ("draft", "verify", "draft_extend")
NOT_CAPTURED = "no graph was captured"


class GraphLog:
    """Counts of one process. A pass is asked more than once whether it may replay; it counts once a step."""

    def __init__(self) -> None:
        self.replays: dict[str, int] = {}
        self.eager: dict[str, int] = {}
        self._replayed: set[str] = set()
        self._refused: dict[str, tuple[str, str]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._replayed.clear()
        self._refused.clear()

    def replay(self, name: str) -> None:
        """The pass ``name`` replays its graph."""
        self._replayed.add(name)
        self.replays[name] = self.replays.get(name, 0) + 1

    def refuse(self, name: str, reason: str, detail: str) -> None:
        """The graph of ``name`` cannot serve this batch."""
        self._refused[name] = (reason, detail)

    def end(self, passes: tuple[str, ...]) -> None:
        """The step ended; what it ran without a graph is counted as eager."""
        for name in passes:
            if name not in self._replayed:
                self.eager[name] = self.eager.get(name, 0) + 1
                reason, detail = self._refused.get(
                    name, (NOT_CAPTURED, "graphs are off, or this backend has none")
                )
                fallbacks.record(f"cuda graph of {name}", reason, detail=detail)


def name_of(runner: Any) -> str:
    """The pass that a graph runner serves."""
    kind = type(runner).__name__
    if "DraftExtend" in kind:
        return "draft_extend"
    if "Draft" in kind:
        return "draft"
    mode = getattr(runner, "capture_forward_mode", None)
    return "verify" if mode is not None and mode.is_target_verify() else "decode"


def why_not(runner: Any, batch: Any) -> tuple[str, str]:
    """Why a runner refused a batch, in words: reason without numbers, and detail with them and the remedy."""
    size = int(getattr(batch, "batch_size", 0))
    if getattr(batch, "replace_embeds", None) is not None:
        return "a request brings its own embeddings", ""
    width = getattr(getattr(batch, "spec_info", None), "num_tokens_per_req", 0) or 0
    captured = getattr(runner, "captured_req_width", width)
    if width > 0 and width != captured:
        return "tokens a request differ from the captured ones", f"{width} tokens, captured {captured}"
    largest = getattr(runner, "max_bs", size)
    if size > largest:
        return (
            "the batch is above the largest captured one",
            f"batch {size}, largest {largest}; raise --cuda-graph-max-bs or lower --max-running-requests",
        )
    if getattr(runner, "disable_padding", False):
        return (
            "this batch size was not captured and padding is off",
            f"batch {size}; list it in --cuda-graph-bs",
        )
    return "the batch needs what the graph does not hold", f"batch {size}"
