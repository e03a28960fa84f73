"""Topic ``run-end``: cut every run where plain decoding would have ended the request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from sglang.fork import counters
from sglang.srt.speculative.semantics.accounting import shorten_run
from sglang.srt.speculative.semantics.run_end import EndRules, find_run_end, tail_decoder


def resolve_tokens(
    original: Callable[..., list[list[int]]], processor: Any, result: Any, batch: Any
) -> list[list[int]]:
    """Around the resolver of a verify's tokens: drop what lies behind the end of a request.

    The resolver runs before the tokens enter the output, so everything downstream (output ids, logprobs,
    hidden states, reasoning tokens, text, usage, KV) sees only tokens that plain decoding would have made.
    Requests that were finished or retracted before this step are left as they are: they commit nothing.
    """
    live = [not (request.finished() or request.is_retracted) for request in batch.reqs]
    runs = original(processor, result, batch)
    for index, request in enumerate(batch.reqs):
        run = runs[index]
        if not live[index]:
            continue
        kept = kept_tokens(request, run)
        if kept < len(run):
            counters.add("run_tokens_behind_end", len(run) - kept)
        shorten_run(request, result, index, had=len(run), kept=kept)
        runs[index] = run[:kept]
    return runs


def kept_tokens(request: Any, run: Sequence[int]) -> int:
    """How many tokens of ``run`` plain decoding would have given this request."""
    if len(run) < 2:
        return len(run)
    if request.to_finish is not None:
        # An abort takes effect at the next token.
        return 1
    end = find_run_end(request.output_ids, run, rules_of(request))
    return len(run) if end is None else end.kept


def rules_of(request: Any) -> EndRules:
    """The request's rules; built once, since nothing of them changes after admission."""
    rules: EndRules | None = getattr(request, "_run_end_rules", None)
    if rules is None:
        rules = _build_rules(request)
        request._run_end_rules = rules
    return rules


def _build_rules(request: Any) -> EndRules:
    parameters, tokenizer = request.sampling_params, request.tokenizer
    stops: set[int] = set()
    if not parameters.ignore_eos:
        stops.update(parameters.stop_token_ids or ())
        stops.update(request.eos_token_ids or ())
        if tokenizer is not None:
            if tokenizer.eos_token_id is not None:
                stops.add(tokenizer.eos_token_id)
            stops.update(tokenizer.additional_stop_token_ids or ())
    matches: list[Callable[[str], bool]] = [_contains(text) for text in parameters.stop_strs]
    matches += [_searches(pattern) for pattern in parameters.stop_regex_strs]
    window = max(parameters.stop_str_max_len, parameters.stop_regex_max_len) + 1
    return EndRules(
        max_new_tokens=parameters.max_new_tokens,
        vocab_size=request.vocab_size,
        stop_tokens=frozenset(stops),
        text_ends=tail_decoder(tokenizer.decode, matches, window) if matches else None,
    )


def _contains(stop: str) -> Callable[[str], bool]:
    return lambda text: stop in text


def _searches(pattern: str) -> Callable[[str], bool]:
    def search(text: str) -> bool:
        try:
            return re.search(pattern, text) is not None
        except (re.error, RecursionError):
            # Upstream aborts such a request at its next token; the cut makes that the first of the run.
            return True

    return search
