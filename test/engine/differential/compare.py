"""What must be equal in two answers to the same request, and what may differ in the last bits."""

from __future__ import annotations

import math
import re
from typing import Any

# Absolute tolerance of log probabilities and hidden states between float32 kernels of different shapes.
TOLERANCE = 2e-3
# The logarithm of the smallest normal float32. Below it a batch in which somebody samples gives the lowest float, an all-greedy
# one the value, with speculation or without: what a greedy request is told depends on its neighbours.
UNDERFLOW = -87.3
_CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\] ")
# Facts about the server's work, not about the answer.
VOLATILE = frozenset(
    [
        "id",
        "created",
        "e2e_latency",
        "response_sent_to_client_ts",  # a wall-clock stamp, there or not by a race within upstream
        "cached_tokens",
        "cached_tokens_details",
        "num_retractions",
        "dp_rank",
        "weight_version",
        "metadata",
        "prompt_tokens_details",
        "sglext",
    ]
)


def differences(expected: Any, found: Any, at: str = "") -> list[str]:
    """Places where two decoded answers differ; numbers that are no integers are compared with tolerance."""
    if isinstance(expected, dict) and isinstance(found, dict):
        out = []
        if _refused(expected) and _refused(found):
            expected, found = _bare(expected), _bare(found)
        for key in sorted(expected.keys() | found.keys()):
            if key in VOLATILE or str(key).startswith("spec_"):
                continue
            if key in ("output_top_logprobs", "input_top_logprobs", "top_logprobs"):
                out += _top(expected.get(key), found.get(key), f"{at}.{key}")
            elif key == "hidden_states":
                out += differences(_states(expected.get(key)), _states(found.get(key)), f"{at}.{key}")[:3]
            else:
                out += differences(expected.get(key), found.get(key), f"{at}.{key}")
        return out
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{at}: {len(expected)} entries, found {len(found)}"]
        return [
            d
            for i, pair in enumerate(zip(expected, found, strict=True))
            for d in differences(*pair, f"{at}[{i}]")
        ]
    if isinstance(expected, float) and isinstance(found, (float, int)):
        expected, found = max(expected, UNDERFLOW), max(found, UNDERFLOW)
        close = math.isclose(expected, found, abs_tol=TOLERANCE, rel_tol=TOLERANCE)
        return [] if close else [f"{at}: {expected}, found {found}"]
    if isinstance(expected, str) and isinstance(found, str):
        # The grammar compiler's messages tell the time.
        expected, found = _CLOCK.sub("", expected), _CLOCK.sub("", found)
    return [] if expected == found else [f"{at}: {expected!r}, found {found!r}"]


def _refused(answer: dict[str, Any]) -> bool:
    reason = (answer.get("meta_info") or {}).get("finish_reason") or {}
    return reason.get("type") == "abort" and reason.get("status_code") == 400


def _bare(answer: dict[str, Any]) -> dict[str, Any]:
    """A refusal as far as it depends on its own request.

    Upstream streams it as an answer of one token, which no model chose, and gives it empty lists of log probabilities
    where a request of the same step asks for some.
    """
    meta = {key: value for key, value in answer["meta_info"].items() if "logprobs" not in key or value}
    return {**answer, "output_ids": [], "text": "", "meta_info": meta}


def _top(expected: Any, found: Any, at: str) -> list[str]:
    """Top log probabilities: ranks whose values are within tolerance may change places."""
    if not expected or not found:
        return [] if (expected or None) == (found or None) else [f"{at}: {expected!r}, found {found!r}"]
    if len(expected) != len(found):
        return [f"{at}: {len(expected)} entries, found {len(found)}"]
    out = []
    for i, (left, right) in enumerate(zip(expected, found, strict=True)):
        out += differences(_values(left), _values(right), f"{at}[{i}]")
    return out


def _states(states: Any) -> Any:
    """Hidden states, one entry a token. The first holds the prompt's, of which the prefix cache leaves out a part:
    its last one counts."""
    if not states or not isinstance(states[0], list):
        # "last" asks for one state, which is a list of numbers.
        return states
    return [states[0][-1:], *states[1:]]


def _values(entry: Any) -> list[float]:
    """Log probabilities of one position: of one entry in chat form, of a list of entries, or of none."""
    if isinstance(entry, dict):
        # One entry in chat form; in completions' form a mapping of tokens to values.
        return [entry["logprob"]] if "logprob" in entry else sorted(entry.values(), reverse=True)
    return [item["logprob"] if isinstance(item, dict) else item[0] for item in entry or []]


def identities(meta: dict[str, Any]) -> list[str]:
    """What must hold among an answer's own counts (E4, G1, G4)."""
    out = []
    histogram = meta.get("spec_correct_drafts_histogram")
    if histogram is not None:
        steps, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        if sum(histogram) != steps:
            out.append(f"histogram {histogram} does not sum to {steps} verifies")
        if sum(i * n for i, n in enumerate(histogram)) != correct:
            out.append(f"histogram {histogram} does not hold {correct} correct drafts")
        made, aborted = meta["completion_tokens"], meta["finish_reason"]["type"] == "abort"
        # A retracted request is prefilled again, and each prefill makes a token; but overlapped scheduling may
        # retract a request while the result of its prefill is under way, and throws that token away.
        most = 1 + meta.get("num_retractions", 0)
        if made and not aborted and not 1 <= made - steps - correct <= most:
            out.append(
                f"{made} tokens from 1 to {most} prefills, {steps} verifies and {correct} correct drafts"
            )
    return out
