"""Around the capture of a server's graphs: the branch goes in before, and a draft extend for it is captured behind."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.ahead.branch import Branch, last_layer
from sglang.srt.speculative.cycle_graph.ahead.graphs import capture_extend
from sglang.srt.speculative.cycle_graph.ahead.kernel import MOST_ROWS
from sglang.srt.speculative.cycle_graph.ahead.projection import projection_of
from sglang.srt.speculative.cycle_graph.contexts import as_draft

logger = logging.getLogger(__name__)

SETTING = "SGLANG_SPEC_PROJECT_AHEAD"
# Off until a run on a GPU has shown what it takes off a cycle.
DEFAULT_PROGRAMS = 0
ATTRIBUTE = "fork_project_ahead"


@dataclass(frozen=True)
class Ahead:
    """What the cycle's graphs of small batches use in the place of the packed states.

    Attributes:
        projected: [R, H], written by verify, read by ``extend``.
        rows: sizes, in rows, at which both were captured.
        extend: graph runner of the draft extend that reads it.
    """

    projected: torch.Tensor
    rows: frozenset[int]
    extend: Any


def wanted() -> int:
    """Thread blocks of the projection; 0 where it is not made ahead."""
    text = os.environ.get(SETTING, "").strip()
    return int(text) if text.isdigit() else DEFAULT_PROGRAMS


def make_branch(worker: Any, programs: int) -> tuple[Branch | None, str]:
    """The branch for an EAGLE-3 worker whose models are loaded, not yet installed; or None and why there is none."""
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    target, runner = worker.target_worker.model_runner, worker.draft_worker.draft_runner
    layer, states = last_layer(target.model)
    if layer is None:
        return None, "no layer of the target leaves a state before the last one ends"
    projection, reason = projection_of(runner.model, int(get_draft_input_from_target_hidden_dim(runner)))
    if projection is None:
        return None, reason
    width = int(worker.speculative_num_draft_tokens)
    if width > MOST_ROWS:
        return None, f"a verify of one request has more than {MOST_ROWS} rows"
    most = MOST_ROWS // width * width
    branch = Branch(projection, most, states, runner.model_config.dtype, worker.device, programs)
    return branch, ""


def captured(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the capture of all graphs of a scheduler."""
    worker: Any = getattr(scheduler, "draft_worker", None)
    programs = wanted()
    if not programs or not hasattr(worker, "draft_worker") or not str(worker.device).startswith("cuda"):
        return original(scheduler, *args, **kwargs)
    branch, reason = _try(worker, programs)
    if branch is None:
        logger.warning("cycle-graph: draft extend projects the packed states itself: %s", reason)
        return original(scheduler, *args, **kwargs)
    layer, _ = last_layer(worker.target_worker.model_runner.model)
    branch.install(layer, worker.target_worker.model_runner.capture_tail_hooks)
    try:
        done = original(scheduler, *args, **kwargs)
    finally:
        branch.remove()
    setattr(worker, ATTRIBUTE, _finish(worker, branch))
    return done


def ahead_of(worker: Any) -> Ahead | None:
    """What was captured for a worker."""
    found: Ahead | None = getattr(worker, ATTRIBUTE, None)
    return found


def _try(worker: Any, programs: int) -> tuple[Branch | None, str]:
    try:
        return make_branch(worker, programs)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _finish(worker: Any, branch: Branch) -> Ahead | None:
    drafter = worker.draft_worker
    if not branch.joined or getattr(drafter, "cuda_graph_runner_for_draft_extend", None) is None:
        logger.warning("cycle-graph: no verify was captured with the projection in it")
        return None
    try:
        with as_draft(drafter):
            extend = capture_extend(drafter, branch.projected, branch.joined)
    except Exception as error:
        # Upstream wraps what a capture raises; the server stands without this one.
        logger.warning("cycle-graph: draft extend over projected states was not captured: %s", error)
        return None
    sizes = frozenset(size * int(extend.captured_req_width) for size in extend.capture_bs)
    logger.info("cycle-graph: the draft's projection runs inside verify for %s rows", sorted(sizes))
    return Ahead(branch.projected, sizes, extend)
