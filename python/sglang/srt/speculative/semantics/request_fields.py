"""Fields that a single request must give as one value, and what upstream's schema lets through for them.

The schema of /generate serves single requests and batches, so a single one may hold a list, or anything, where the scheduler
reads one text or number: it raises there, and ends for everybody. Found by fuzzing (``test/soak/schema_fuzz.py``).
"""

from __future__ import annotations

import re
from typing import Any

# Field to the type of its one value. A number that is True or False is no number.
_ONE: dict[str, tuple[type, str]] = {
    "extra_key": (str, "text"),
    "lora_path": (str, "text"),
    "lora_id": (str, "text"),
    "bootstrap_host": (str, "text"),
    "bootstrap_pair_key": (str, "text"),
    "bootstrap_port": (int, "integer"),
    "bootstrap_room": (int, "integer"),
    "decode_tp_size": (int, "integer"),
}
_WHOLE = ("max_new_tokens", "min_new_tokens", "top_k", "n", "stream_interval", "sampling_seed")
_NUMBER = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_TEXT = ("regex", "json_schema", "ebnf", "structural_tag")
_TEXTS = ("stop", "stop_regex")
_LARGEST = 2**63 - 1
_LARGEST_FLOAT = 3.4028234e38
_SHOWN = 60


def fault(obj: Any, vocabulary: int) -> str | None:
    """What is wrong with a single request's fields, in one sentence with value and remedy; None if nothing is."""
    for field, (kind, named) in _ONE.items():
        value = getattr(obj, field, None)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            return f"{field} = {_shown(value)} is no {named}; a single request takes one {named} or nothing"
    wanted = getattr(obj, "return_hidden_states", False)
    if not isinstance(wanted, bool) and wanted != "last":
        return f'return_hidden_states = {_shown(wanted)} is neither true nor false nor "last"'
    top = getattr(obj, "top_logprobs_num", None)
    if top is not None and not (isinstance(top, int) and 0 <= top <= vocabulary):
        return f"top_logprobs_num = {_shown(top)} is not between 0 and the {vocabulary} tokens of this model"
    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None and not hasattr(overrides, "positions"):
        return (
            f"positional_embed_overrides = {_shown(overrides)} holds no embeddings; only sglang.Engine can be "
            "given them, as PositionalEmbeds"
        )
    return None


def sampling_fault(parameters: dict[str, Any]) -> str | None:
    """What is wrong with the types of sampling parameters; their ranges are upstream's affair.

    Upstream hands them to the scheduler as they are: a fraction where it counts tokens, or a number that no 64-bit
    integer holds, raises there.
    """
    for field in _WHOLE:
        value = parameters.get(field)
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or abs(value) > _LARGEST
        ):
            return f"{field} = {_shown(value)} is no whole number of at most {_LARGEST}"
    for field in _NUMBER:
        value = parameters.get(field)
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            return f"{field} = {_shown(value)} is no number"
    for field in _TEXT:
        value = parameters.get(field)
        if value is not None and not isinstance(value, str):
            return f"{field} = {_shown(value)} is no text; serialise it first"
    for field in _TEXTS:
        value = parameters.get(field)
        texts = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(text, str) for text in texts):
            return f"{field} = {_shown(value)} is neither a text nor a list of texts"
    patterns = parameters.get("stop_regex") or ()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return f"stop_regex = {_shown(pattern)} is no regular expression of Python: {error}"
    stops = parameters.get("stop_token_ids")
    if stops is not None and not (isinstance(stops, (list, set, tuple)) and all(_is_token(t) for t in stops)):
        return f"stop_token_ids = {_shown(stops)} is no list of token ids"
    bias = parameters.get("logit_bias")
    if bias is not None and not (isinstance(bias, dict) and all(_is_bias(v) for v in bias.values())):
        return (
            f"logit_bias = {_shown(bias)} is no mapping of token ids to numbers within {_LARGEST_FLOAT:.3g}"
        )
    return None


def _is_token(value: Any) -> bool:
    """Upstream leaves None out, and takes ids that no model has for tokens which never come."""
    return value is None or (isinstance(value, int) and abs(value) <= _LARGEST)


def _is_bias(value: Any) -> bool:
    """A number that float32 holds; an infinite one does, and bans or demands its token."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        return False
    return abs(value) <= _LARGEST_FLOAT or value in (float("inf"), float("-inf"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
