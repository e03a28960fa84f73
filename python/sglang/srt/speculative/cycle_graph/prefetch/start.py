"""Around the captures of the draft's two graphs: the hooks are in place during them and at no other time."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.fork import fallbacks
from sglang.srt.speculative.cycle_graph.prefetch import kernel
from sglang.srt.speculative.cycle_graph.prefetch.branch import Branch
from sglang.srt.speculative.cycle_graph.prefetch.draft import VERIFIED, Prefetch

logger = logging.getLogger(__name__)

SETTING = "SGLANG_SPEC_DRAFT_PREFETCH"
# Off until a run on a GPU has shown what it takes off a cycle.
DEFAULT_MIB = 0
PATH = "draft prefetch"
ATTRIBUTE = "fork_draft_prefetch"


def wanted() -> int:
    """Bytes that may be asked for and not read yet; 0: nothing is asked for."""
    text = os.environ.get(SETTING, "").strip()
    return (int(text) if text.isdigit() else DEFAULT_MIB) << 20


def prefetch_of(drafter: Any) -> Prefetch | None:
    """What was planned for a draft worker, None where nothing was."""
    found: Prefetch | None = getattr(drafter, ATTRIBUTE, None)
    return found


def captured(original: Any, runner: Any, drafter: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the constructors of the draft's graph runners, which capture."""
    prefetch = _prefetch(drafter)
    if prefetch is None:
        return original(runner, drafter, *args, **kwargs)
    prefetch.install()
    try:
        return original(runner, drafter, *args, **kwargs)
    finally:
        prefetch.remove()


def _prefetch(drafter: Any) -> Prefetch | None:
    """The draft worker's plan, made on the first call."""
    most = wanted()
    if most and not hasattr(drafter, ATTRIBUTE):
        made, reason = _make(drafter, most)
        if made is None:
            fallbacks.record(PATH, reason)
        else:
            for skipped in made.skipped:
                fallbacks.record(PATH, skipped)
            logger.info("cycle-graph: the draft's weights are asked for ahead, in bytes: %s", made.bytes())
        setattr(drafter, ATTRIBUTE, made)
    return prefetch_of(drafter)


def _make(drafter: Any, most: int) -> tuple[Prefetch | None, str]:
    try:
        device = torch.device(drafter.device)
        reason = "" if device.type == "cpu" else kernel.unsupported(device)
        if reason:
            return None, reason
        made = Prefetch(drafter.draft_runner.model, most, Branch(device))
        if not any(made.plan.values()):
            return None, "no weight of the draft can be asked for"
        if device.type == "cuda":
            # Compiled and loaded before any capture begins.
            parts = made.plan[VERIFIED] or next(parts for parts in made.plan.values() if parts)
            kernel.prefetch(parts[0].memory)
            torch.cuda.synchronize()
    except AttributeError:
        return None, "the draft is not of Llama's form"
    except Exception as error:  # Triton's compile errors are no RuntimeError
        return None, f"it failed: {type(error).__name__}"
    return made, ""
