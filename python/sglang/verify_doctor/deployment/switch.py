"""What plain decode beside verify (``--speculative-auto``) takes of a rank's memory, by the functions that a start asks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang.verify_doctor.deployment import parts
from sglang.verify_doctor.deployment.subject import Deployment

# Requests that upstream makes room for where nobody limits them: from the cache's size, between these.
FEWEST_SLOTS, MOST_SLOTS, SLOTS_A_CONTEXT = 2048, 4096, 512


@dataclass(frozen=True)
class Part:
    """Bytes of one part on a rank, and how they are known."""

    name: str
    bytes: int
    source: str


def plan(it: Deployment, tokens: int, token_bytes: int) -> list[Part]:
    """The parts of the switch; empty where it stays off.

    Args:
        it: what is described.
        tokens: of the KV cache.
        token_bytes: of a token in it, target and draft.
    """
    if it.target is None or it.draft is None or parts.auto_off(it) is not None:
        return []
    from sglang.srt.speculative.auto import graphs, reserve, rows
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim
    from sglang.srt.speculative.graph_policy import capture, room

    target, draft = _runner(it, it.target.config), _runner(it, it.draft.config)
    facts = capture.model_facts(target, "decode")
    found = []
    for kind in parts.graph_kinds(it):
        if kind.kind == "decode":
            estimate = room.estimate(kind, facts)
            prefill = graphs.prefill_bytes(it.args, facts)
            found.append(
                Part(
                    "graphs of plain decode",
                    estimate.total,
                    f"estimated as a start does it, sizes up to {kind.largest_rows}; captured last, and only if they, the "
                    f"ring and {prefill / 1e9:.2f} GB for a prefill fit into what is free then, which only a device tells",
                )
            )
    slots = requests(it, tokens) + 1
    width = int(get_draft_input_from_target_hidden_dim(draft))
    size = int(it.draft.dtype.itemsize)
    span = rows.span_for(slots, width, size)
    found.append(
        Part(
            "ring of rows owed to the draft",
            rows.ring_bytes(slots, span, width, size),
            f"{slots} request slots, {span} rows each of {width} columns",
        )
    )
    ahead = min(reserve.AHEAD * (slots - 1), tokens // reserve.SHARE)
    found.append(
        Part(
            "of the KV cache, slots ahead of plain steps",
            ahead * token_bytes,
            f"at most: {reserve.AHEAD} a request that decodes plainly, while that is under 1/{reserve.SHARE} of what is free",
        )
    )
    return found


def requests(it: Deployment, tokens: int) -> int:
    """Requests that upstream's pool has slots for, from the limit or from the cache's size in tokens."""
    limit = it.args.max_running_requests
    if limit:
        return min(int(limit), tokens // 2)
    context = max(it.target.context if it.target else 1, 1)
    estimated = int(tokens / context * SLOTS_A_CONTEXT)
    return min(max(min(estimated, MOST_SLOTS), FEWEST_SLOTS), tokens // 2)


def _runner(it: Deployment, config: Any) -> Any:
    """As much of upstream's model runner as sizes follow from."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(str(it.args.speculative_algorithm))
    return SimpleNamespace(model_config=config, spec_algorithm=algorithm, attn_backend=None)
