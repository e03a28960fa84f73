"""Topic ``run-logprobs``: a request for no token is scored, whatever its neighbours, with speculation as without.

``max_new_tokens`` 0 asks what the model thinks of the next token and draws none. Where a whole prefill is of that kind,
plain decoding takes the log softmax of the masked logits: no temperature, and minus infinity (null in JSON) for a banned
token. Beside a request that does want tokens, and always under speculation, upstream sends the row through the sampler,
which divides by the temperature and cuts off at the lowest float. Here the row gets the values of the first kind on
every way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_WANTED = "run_scored_rows"
_SCORES = "run_scores"


@dataclass(frozen=True)
class Scored:
    """Row ``row`` of a step wants ``tops`` most likely tokens and the values of ``token_ids``, and no draw."""

    row: int
    tops: int
    token_ids: tuple[int, ...]


def scored_rows(requests: Iterable[Any]) -> list[Scored]:
    """The requests for no token among those of a step that ask for log probabilities of their next one."""
    found = []
    for row, request in enumerate(requests):
        if request.sampling_params.max_new_tokens == 0 and request.return_logprob:
            asked = request.logprob
            scored = Scored(row, asked.top_logprobs_num, tuple(asked.token_ids_logprob or ()))
            if scored.tops or scored.token_ids:
                found.append(scored)
    return found


def mark(original: Callable[..., Any], kind: type, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the making of a forward pass: its sampling info tells which rows are scored.

    Set for every pass, because a batch keeps its info from one step to the next and its rows move.
    """
    forward = original(kind, batch, *args, **kwargs)
    if batch.sampling_info is not None:
        vars(batch.sampling_info).pop(_SCORES, None)  # of a sampler that never handed them on
        setattr(batch.sampling_info, _WANTED, scored_rows(batch.reqs) if batch.return_logprob else [])
    return forward


def _places(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Indices on the device. A list as an index would be copied with a wait for all that runs there."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


def keep_scores(
    original: Callable[..., torch.Tensor], sampler: Any, logits: torch.Tensor, sampling_info: Any
) -> torch.Tensor:
    """Around the last change to the logits ``[R, V]``: the log softmax of the scored rows, before any temperature.

    It runs within ``run-nonfinite``'s guard, so that a row of NaN is told as such and not as the guard levels it.
    """
    logits = original(sampler, logits, sampling_info)
    wanted: list[Scored] = getattr(sampling_info, _WANTED, [])
    if wanted:
        rows = logits[_places([scored.row for scored in wanted], logits.device)]
        setattr(sampling_info, _SCORES, torch.nn.functional.log_softmax(rows, dim=-1))
    return logits


def use_scores(
    original: Callable[..., Any], sampler: Any, logits_output: Any, info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the sampler and around the scoring without a draw: scored rows get their own values.

    They stay on the device, in the form in which upstream hands on those of the other rows.
    """
    outcome = original(sampler, logits_output, info, *args, **kwargs)
    scores = vars(info).pop(_SCORES, None)
    if scores is None:
        return outcome
    for scored, values in zip(getattr(info, _WANTED), scores, strict=True):
        if scored.tops:
            top = values.topk(scored.tops)
            logits_output.next_token_top_logprobs_val[scored.row] = top.values
            logits_output.next_token_top_logprobs_idx[scored.row] = top.indices
        if scored.token_ids:
            chosen = values[_places(scored.token_ids, values.device)]
            logits_output.next_token_token_ids_logprobs_val[scored.row] = chosen
    return outcome


def prefill_entries(
    original: Callable[..., int], processor: Any, index: int, request: Any, *rest: Any
) -> int:
    """Around the entries that a prefill adds: a request for no token keeps those of its prompt only.

    The sampler has drawn one beside its neighbours', and nobody is shown it.
    """
    entries = original(processor, index, request, *rest)
    if request.sampling_params.max_new_tokens == 0:
        request.logprob.output_token_logprobs_val.clear()
        request.logprob.output_token_logprobs_idx.clear()
    return entries
