"""Topic ``run-logprobs``: log probabilities as without speculation, and none for those who did not ask.

Upstream's result processors expect a tensor for each request, but get a plain list for a request that did not
ask for chosen tokens while another of its batch did, and the scheduler ends in an AttributeError. What a request for no
token is told is in ``scoring_hooks``.
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


def greedy_unscaled(original: Callable[..., Any], kind: type, batch: Any, vocab_size: int) -> Any:
    """Around the building of a batch's sampling info: a greedy row has temperature 1.

    Its token does not depend on the temperature, but upstream divides its log probabilities by it where a neighbour
    samples, and does not where all are greedy: with ``top_k`` 1 they would tell who else was in the batch.
    """
    info = original(kind, batch, vocab_size)
    each = [request.sampling_params for request in batch.reqs]
    if any(one.top_k == 1 and one.temperature != 1.0 for one in each):
        info.temperatures.masked_fill_(info.top_ks.unsqueeze(-1) <= 1, 1.0)
    return info


def sampled_log_softmax(
    original: Callable[..., torch.Tensor], logits: torch.Tensor, dim: int
) -> torch.Tensor:
    """In place of a sampled verify's log softmax: the logarithm of the probabilities, as plain decoding takes it.

    The two differ where a probability is 0 in float32: plain decoding says minus infinity there (and then the lowest
    float), a log softmax the value.
    """
    from sglang.srt.runtime_context import get_exec

    if get_exec().deterministic.enable_deterministic_inference:
        # Plain decoding has another rule in this mode: the log softmax.
        return original(logits, dim=dim)
    return torch.softmax(logits, dim=dim).log_()
