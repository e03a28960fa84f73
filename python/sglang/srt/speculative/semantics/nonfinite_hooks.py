"""Topic ``run-nonfinite``: a request whose logits are NaN or infinite is aborted; the others go on.

Upstream lets such a row choose a token (or crash the scheduler inside the sampler, or decode an id outside
the vocabulary some steps later). What tells them travels to the host where upstream copies the step's result, beside the
next step and without a wait of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from sglang.fork import counters
from sglang.srt.speculative.semantics.accounting import shorten_run
from sglang.srt.speculative.semantics.nonfinite import good_run, is_bad, row_maxima
from sglang.srt.speculative.semantics.processor_guard import FAULT

# Where a verify's result carries the good tokens of each request, on the device until its results are copied.
GOOD_TOKENS = "run_good_tokens"
_MAXIMA = "run_row_maxima"
_BAD = "run_bad_rows"


def verify(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None
) -> Any:
    """Around the verify's sampler: look at the rows after masks, bias and processors had their turn."""
    outcome = original(verify_input, batch, logits_output, grammar_mask)
    if not batch.forward_mode.is_idle():
        setattr(logits_output, GOOD_TOKENS, good_run(logits_output.next_token_logits, outcome[2]))
    return outcome


def guard_logits(
    original: Callable[..., torch.Tensor], sampler: Any, logits: torch.Tensor, sampling_info: Any
) -> torch.Tensor:
    """Around the last change to the logits of prefill and plain decode.

    Where a draw follows, a bad row is made uniform: a sampler may fail on NaN, and with it the whole batch.
    """
    logits = original(sampler, logits, sampling_info)
    setattr(sampling_info, _MAXIMA, row_maxima(logits, level=not sampling_info.is_all_greedy))
    return logits


def sample(
    original: Callable[..., torch.Tensor],
    sampler: Any,
    logits_output: Any,
    info: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Around the sampler of prefill and plain decode: the maxima of ``guard_logits`` go with the result."""
    tokens = original(sampler, logits_output, info, *args, **kwargs)
    maxima = vars(info).pop(_MAXIMA, None)
    if maxima is not None:
        setattr(logits_output, _MAXIMA, maxima)
    return tokens


def copy_to_host(original: Callable[..., None], result: Any, *args: Any, **kwargs: Any) -> None:
    """Around the copy of a step's results: what tells bad rows goes along, and is there once ``copy_done`` is."""
    for name in (GOOD_TOKENS, _MAXIMA):
        told = getattr(result.logits_output, name, None)
        if told is not None:
            setattr(result.logits_output, name, _to_host(told))
    original(result, *args, **kwargs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """An asynchronous copy on the current stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    # The copy runs beside the stream that made the tensor, and nothing else holds it.
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return host


def resolve_tokens(
    original: Callable[..., list[list[int]]], processor: Any, result: Any, batch: Any
) -> list[list[int]]:
    """Around the resolver of a verify's tokens: keep what came before the first bad row, then abort."""
    live = [not (request.finished() or request.is_retracted) for request in batch.reqs]
    runs = original(processor, result, batch)
    good = getattr(result.logits_output, GOOD_TOKENS, None)
    if good is None:
        return runs
    for index, (request, kept) in enumerate(zip(batch.reqs, good.tolist(), strict=True)):
        if live[index] and kept < len(runs[index]):
            shorten_run(request, result, index, had=len(runs[index]), kept=kept)
            runs[index] = runs[index][:kept]
            _abort(request, made=len(request.output_ids) + kept)
    return runs


def process_single(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """Around the result processors of prefill and plain decode: one row a request.

    Upstream waits for the same event a few lines on. Without overlap there is no such copy: the maxima are still on the
    device, and reading them waits for the step, as reading its tokens would.
    """
    maxima = getattr(getattr(result, "logits_output", None), _MAXIMA, None)
    if maxima is not None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        for request, maximum in zip(batch.reqs, maxima.tolist(), strict=False):
            if (
                is_bad(maximum)
                and not request.finished()
                and not request.is_retracted
                and request.inflight_middle_chunks <= 0
            ):
                if request.sampling_params.max_new_tokens == 0:
                    # Nothing is chosen from that row; plain decoding, which only scores it, looks no closer.
                    setattr(request, _BAD, True)
                else:
                    _abort(request, made=len(request.output_ids))
    original(processor, batch, result)


def release(original: Callable[..., None], request: Any, tree_cache: Any, is_insert: bool = True) -> None:
    """Around the release of KV: what produced NaN must not be handed to the next request with this prefix."""
    original(request, tree_cache, is_insert and not getattr(request, _BAD, False))


def _abort(request: Any, *, made: int) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    counters.add("nonfinite_logits_aborts")
    setattr(request, _BAD, True)
    fault = getattr(request, FAULT, None)
    if fault is not None:
        request.to_finish = FINISH_ABORT(
            f"after {made} output tokens the request's custom logit processor {fault}; this request was aborted, "
            "others are not affected. Correct the processor or its custom_params.",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )
        return
    request.to_finish = FINISH_ABORT(
        f"after {made} output tokens the logits were NaN or infinite, or no token was allowed; "
        "this request was aborted, others are not affected. Usual causes: overflow in activations or KV scales "
        "(try --dtype bfloat16 or --kv-cache-dtype auto), damaged weights, or a grammar that forbids what "
        "min_new_tokens or logit_bias demands.",
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "InternalServerError",
    )
