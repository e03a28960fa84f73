"""Which features a request uses and how its answers ended: what a run of the suite has really compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .cases import CHAT, COMPLETIONS, END, GENERATE, GRAMMARS, Case
from .pair import bodies

# What a run of ``make test-differential`` must have asked for, each at least so often among 320 generated requests.
WANTED = {
    "path generate": 150,
    "path chat": 30,
    "path completions": 30,
    "streamed": 40,
    "whole": 100,
    "stop text": 30,
    "stop token": 30,
    "stop on an end token": 8,
    "stop regex": 8,
    "ignore_eos": 10,
    "min_new_tokens": 20,
    "frequency_penalty": 20,
    "presence_penalty": 15,
    "repetition_penalty": 15,
    "logit_bias": 15,
    "min_p": 10,
    "top_k": 15,
    "top_p": 10,
    "seed": 60,
    "custom processor": 8,
    "regex": 10,
    "json schema": 8,
    "ebnf": 3,
    "structural tag": 3,
    "tools": 4,
    "logprobs": 50,
    "top logprobs": 25,
    "token id logprobs": 20,
    "prompt logprobs": 20,
    "text in logprobs": 8,
    "hidden states": 8,
    "n above 1": 10,
    "batched": 12,
    "context limit": 8,
    "no token": 16,
    "no token under a grammar": 6,
    "no token at a temperature": 4,
    "usage in a stream": 4,
    "echo": 2,
    "skip_special_tokens off": 4,
    "no_stop_trim": 6,
}


def features(case: Case) -> set[str]:
    """The features of one request."""
    body = case.body
    asked = body.get("sampling_params", body)
    first: dict[str, Any] = asked[0] if isinstance(asked, list) else asked
    prompt = body.get("text", body.get("input_ids", body.get("prompt")))
    kind = {GENERATE: "generate", CHAT: "chat", COMPLETIONS: "completions"}[case.path]
    told = {f"path {kind}", "streamed" if case.stream else "whole"}
    schema = (body.get("response_format") or {}).get("type") == "json_schema"
    scored = first.get("max_new_tokens") == 0
    length = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else 0
    present = {
        "stop text": first.get("stop"),
        "stop token": first.get("stop_token_ids"),
        "stop on an end token": set(first.get("stop_token_ids") or ()) & set(END),
        "stop regex": first.get("stop_regex"),
        "ignore_eos": first.get("ignore_eos"),
        "min_new_tokens": first.get("min_new_tokens") or first.get("min_tokens"),
        "logit_bias": first.get("logit_bias"),
        "seed": "sampling_seed" in first or "seed" in first,
        "custom processor": body.get("custom_logit_processor"),
        "json schema": first.get("json_schema") or schema,
        "regex": first.get("regex"),
        "ebnf": first.get("ebnf"),
        "structural tag": first.get("structural_tag"),
        "tools": body.get("tools"),
        "logprobs": body.get("return_logprob") or body.get("logprobs"),
        "top logprobs": body.get("top_logprobs_num")
        or body.get("top_logprobs")
        or (kind == "completions" and body.get("logprobs")),
        "token id logprobs": body.get("token_ids_logprob"),
        "prompt logprobs": body.get("return_logprob") and body.get("logprob_start_len", -1) >= 0,
        "text in logprobs": body.get("return_text_in_logprobs"),
        "hidden states": body.get("return_hidden_states"),
        "n above 1": (first.get("n") or body.get("n") or 1) > 1,
        "batched": isinstance(prompt, list) and prompt and not isinstance(prompt[0], int),
        "context limit": length > 200,
        "no token": scored,
        "no token under a grammar": scored and GRAMMARS & first.keys(),
        "no token at a temperature": scored and first.get("temperature"),
        "usage in a stream": body.get("stream_options"),
        "echo": body.get("echo"),
        "skip_special_tokens off": first.get("skip_special_tokens") is False,
        "no_stop_trim": first.get("no_stop_trim"),
    }
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "top_k", "top_p"):
        present[name] = first.get(name) is not None
    return told | {name for name, value in present.items() if value}


def counted(cases: Sequence[Case]) -> Counter[str]:
    """How many requests use each feature."""
    return Counter(name for case in cases for name in features(case))


def endings(answers: Sequence[Any]) -> Counter[str]:
    """How the answers of /generate ended, by kind: length, a token, a text, an abort."""
    out: Counter[str] = Counter()
    for answer in answers:
        for body in bodies(answer):
            reason = body["meta_info"]["finish_reason"]
            matched = reason.get("matched")
            kind = {int: " on a token", str: " on a text"}.get(type(matched), "")
            out[reason["type"] + kind] += 1
    return out
