"""What capturing graphs took: room before, memory and seconds after, and an error that names what to lower.

Memory is the device's free memory before and after, as upstream logs it, so it holds static buffers, the attention
workspace, the graphs and what the warm-up left behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang.fork import counters
from sglang.srt.speculative.graph_policy.facts import kind_of
from sglang.srt.speculative.graph_policy.reasons import NOT_CAPTURED, Eager
from sglang.srt.speculative.graph_policy.room import REMEDY, ModelFacts, Room, estimate
from sglang.srt.speculative.graph_policy.sizes import KindPlan

logger = logging.getLogger("sglang.fork.graphs")
T = TypeVar("T")

OOM_WORDS = ("out of memory", "outofmemory", "cuda_error_out_of_memory", "cublas_status_alloc_failed")
COUNTER = "graph_capture"


@dataclass(frozen=True)
class Captured:
    """One capture of one kind of graph."""

    plan: KindPlan
    estimated: int
    bytes: int
    seconds: float

    def text(self) -> str:
        """The log line."""
        count = len(self.plan.sizes)
        return (
            f"Graphs of {self.plan.text()}: {count} captured, {self.bytes / 1e9:.2f} GB "
            f"(estimated {self.estimated / 1e9:.2f}), {self.seconds:.1f} s"
        )


class CaptureOutOfMemory(RuntimeError):
    """Capturing graphs ran out of memory."""

    def __init__(self, plan: KindPlan, room: Room | None, free: int | None) -> None:
        need = f"about {room.estimate.text()}" if room is not None else "an unknown amount"
        left = f"{free / 1e9:.2f} GB" if free is not None else "less"
        super().__init__(
            f"out of memory while capturing graphs of {plan.text()}: they need {need} and {left} were free; {REMEDY}"
        )
        self.plan = plan


_captured: dict[str, Captured] = {}
_absent: dict[str, Eager] = {}


def captured() -> dict[str, Captured]:
    """What was captured so far, by kind."""
    return dict(_captured)


def describe() -> list[tuple[str, str]]:
    """Rows for the doctor and the server's state: kind -> sizes, memory, seconds."""
    return [(f"graphs of {kind}", item.text()) for kind, item in _captured.items()]


def state() -> dict[str, dict[str, Any]]:
    """The same as plain builtins."""
    return {
        kind: {
            "width": item.plan.width,
            "sizes": list(item.plan.sizes),
            "rows": list(item.plan.rows),
            "bytes": item.bytes,
            "estimated_bytes": item.estimated,
            "seconds": round(item.seconds, 3),
        }
        for kind, item in _captured.items()
    }


def reset() -> None:
    """Forget everything (for tests)."""
    _captured.clear()
    _absent.clear()


def absent(kind: str, why: Eager) -> None:
    """Note that no graph of ``kind`` is captured, and why."""
    _absent[kind] = why


def why_absent(kind: str) -> Eager:
    """Why ``kind`` has no graph at all."""
    return _absent.get(kind) or Eager(NOT_CAPTURED, "this backend has none, or they are disabled")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it came from, says that memory ran out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = f"{type(error).__name__} {error}".lower()
        if any(words in text for words in OOM_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def record(plan: KindPlan, estimated: int, taken: int, seconds: float, *, speak: bool = True) -> Captured:
    """Note a capture: one log line, counters, and the state behind ``describe``."""
    found = _captured[plan.kind] = Captured(plan, estimated, max(0, taken), seconds)
    counters.add(f"{COUNTER}_sizes", len(plan.sizes), kind=plan.kind)
    counters.add(f"{COUNTER}_bytes", found.bytes, kind=plan.kind)
    counters.add(f"{COUNTER}_seconds", round(seconds, 3), kind=plan.kind)
    if speak:
        logger.info("%s", found.text())
    return found


def watched(
    plan: KindPlan, model: ModelFacts, free: Callable[[], int], work: Callable[[], T], *, speak: bool = True
) -> T:
    """Run a capture: say what room it needs, measure it, and name the remedy when memory runs out.

    Args:
        plan: sizes about to be captured.
        model: what the estimate follows from.
        free: free bytes of the device, asked before and after.
        work: the capture.
        speak: whether this rank logs.

    Raises:
        CaptureOutOfMemory: in place of an exception that came from missing memory.
    """
    before = free()
    room = Room(estimate(plan, model), before)
    if speak:
        logger.log(logging.INFO if room.fits else logging.WARNING, "%s", room.text())
    begun = time.perf_counter()
    try:
        done = work()
    except Exception as error:
        if is_out_of_memory(error):
            raise CaptureOutOfMemory(plan, room, before) from error
        raise
    record(plan, room.estimate.total, before - free(), time.perf_counter() - begun, speak=speak)
    return done


def model_facts(runner: Any, kind: str, attention: Any = None) -> ModelFacts:
    """Read a ``ModelRunner``: sizes of its model, and the attention workspace of a row."""
    config = runner.model_config
    text = getattr(config, "hf_text_config", None) or config.hf_config
    vocabulary = getattr(config.hf_config, "draft_vocab_size", None) or config.vocab_size
    kept = 3 if kind in ("verify", "decode") and runner.spec_algorithm.is_eagle3() else 1
    return ModelFacts(
        hidden=int(config.hidden_size),
        vocabulary=int(vocabulary),
        layers=int(getattr(text, "num_hidden_layers", 1) or 1),
        dtype_bytes=int(config.dtype.itemsize),
        kept_hidden=0 if runner.spec_algorithm.is_none() else kept,
        attention_row_bytes=attention_row_bytes(attention if attention is not None else runner.attn_backend),
    )


def attention_row_bytes(backend: Any) -> int:
    """Bytes a row of what the Triton backend allocates for graphs; 0 for backends whose needs are not known.

    Two arrays grow with rows: float32 partial outputs (heads x KV splits x value width), and one int64 slot for every
    position of the longest context.
    """
    try:
        heads, splits = int(backend.num_head), int(backend.max_kv_splits)
        return heads * splits * (int(backend.v_head_dim) + 1) * 4 + int(backend.max_context_len) * 8
    except (AttributeError, TypeError):
        return 0


def plan_of(runner: Any) -> KindPlan:
    """The plan that a graph runner captured."""
    return KindPlan(kind_of(runner), int(runner.captured_req_width), tuple(sorted(runner.capture_bs)))
