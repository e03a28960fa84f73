"""Topic ``run-logprobs``: log probabilities as without speculation, and none for those who did not ask.

Upstream's result processors expect a tensor for each request, but get a plain list for a request that did not
ask for chosen tokens while another of its batch did, and the scheduler ends in an AttributeError. And a request
for no token at all gets the log probability of one under speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def chosen_tokens(
    original: Callable[..., tuple[list[Any], list[Any]]],
    logprobs: torch.Tensor,
    token_ids: list[list[int] | None],
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Around the gathering of chosen tokens: an empty tensor for every request that did not ask."""
    values, indices = original(logprobs, token_ids, no_copy_to_cpu)
    if no_copy_to_cpu:
        values = [value if torch.is_tensor(value) else logprobs.new_empty(0) for value in values]
    return values, indices


def prefill_entries(
    original: Callable[..., int], processor: Any, index: int, request: Any, *rest: Any
) -> int:
    """Around the entries that a prefill adds: a request for no token keeps those of its prompt only.

    Plain decoding answers such a request without drawing a token; under speculation it takes the ordinary way.
    """
    entries = original(processor, index, request, *rest)
    if request.sampling_params.max_new_tokens == 0:
        request.logprob.output_token_logprobs_val.clear()
        request.logprob.output_token_logprobs_idx.clear()
    return entries
