"""Topic ``run-penalties``: penalties and ``min_new_tokens`` with the history that each row would have had.

Upstream applies one set of penalties to all rows of a verify and, before each step, tells the penalisers of
the last committed token only. Here the penalisers' tensors stay where they are (so that upstream keeps
filtering and merging them with the batch) but they are read per row, and grown after the accept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.speculative.semantics import penalty_rows
from sglang.srt.speculative.semantics.verify_tree import candidate_mask, repeats

_ATTRIBUTE = "run_penalizers"


def keep_penalizers(original: Callable[[Any], Any], info: Any) -> Any:
    """Around ``copy_for_forward``: the copy that a forward pass gets keeps a way to the penalisers."""
    copy = original(info)
    setattr(copy, _ATTRIBUTE, info.penalizer_orchestrator)
    return copy


def cumulate(original: Callable[[Any], None], batch: Any) -> None:
    """Around the per-step update: where a verify follows, the state grows there and not here."""
    algorithm = batch.spec_algorithm
    if algorithm.is_eagle() or algorithm.is_standalone() or algorithm.is_ngram():
        return
    original(batch)


def apply_in_order(
    original: Callable[..., None], orchestrator: Any, logits: torch.Tensor, repeat: int | None = None
) -> None:
    """Around the orchestrator's ``apply``: additive penalties first, then multiplicative ones.

    Upstream iterates a set of classes, whose order changes from process to process; a request with a
    repetition penalty and a frequency penalty gets one of two results. The overlapped path always adds
    first, so that order is the one to keep.
    """
    if repeat is not None:
        original(orchestrator, logits, repeat)
        return
    for penalizer in _ordered(orchestrator):
        penalizer.apply(logits)


def seed_history(original: Callable[..., None], orchestrator: Any, *args: Any, **kwargs: Any) -> None:
    """Around the orchestrator's constructor: requests that were retracted bring their output with them.

    Upstream builds fresh penalisers when a retracted request is prefilled again, and so forgets what it had
    already said. Plain overlapped decoding tells the penalisers of a token one step late, the newest one is
    therefore left to it.
    """
    original(orchestrator, *args, **kwargs)
    if not orchestrator.is_required:
        return
    batch = orchestrator.batch
    late = 1 if batch.spec_algorithm.is_none() and batch.enable_overlap else 0
    for index, request in enumerate(batch.reqs):
        output = list(request.output_ids)
        output = output[: len(output) - late] if output else output
        if output:
            _seed(orchestrator, index, output)


def _seed(orchestrator: Any, index: int, output: Sequence[int]) -> None:
    tokens = torch.tensor(output, dtype=torch.int64, device=orchestrator.device)
    for kind, penalizer in _prepared(orchestrator):
        if kind == "frequency":
            amount = penalizer.frequency_penalties[index].expand(len(output))
            penalizer.cumulated_frequency_penalties[index].index_add_(0, tokens, amount)
        elif kind == "presence":
            penalizer.cumulated_presence_penalties[index, tokens] = penalizer.presence_penalties[index]
        elif kind == "repetition":
            penalizer.cumulated_repetition_penalties[index, tokens] = penalizer.repetition_penalties[index]
        else:
            penalizer.len_output_tokens[index] += len(output)


def verify(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None
) -> Any:
    """Around the verify's sampler: penalise the rows, sample, then grow the state by the accepted tokens."""
    info = batch.sampling_info
    orchestrator = getattr(info, _ATTRIBUTE, None)
    if batch.forward_mode.is_idle() or orchestrator is None or not orchestrator.is_required:
        return original(verify_input, batch, logits_output, grammar_mask)

    rows = verify_input.draft_token_num
    tokens = verify_input.draft_token.reshape(-1, rows).long()
    mask = candidate_mask(verify_input, tokens.device)
    penalise_rows(logits_output.next_token_logits, orchestrator, tokens, mask)
    # What upstream would now add a second time, computed for the request instead of the row.
    info.acc_additive_penalties = None
    info.acc_scaling_penalties = None
    outcome = original(verify_input, batch, logits_output, grammar_mask)
    grow_state(orchestrator, tokens, accept_index=outcome[2])
    return outcome


def penalise_rows(logits: torch.Tensor, orchestrator: Any, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """Apply every prepared penaliser to ``logits`` ``[B * T, V]`` in place."""
    batch, rows = tokens.shape
    view = logits.view(batch, rows, -1)
    counts = repeats(tokens, mask)
    depth = mask.sum(-1, dtype=torch.int32).expand(batch, rows)
    for kind, penalizer in _prepared(orchestrator):
        if kind == "frequency":
            penalty_rows.subtract_frequency(
                view, penalizer.cumulated_frequency_penalties, penalizer.frequency_penalties, tokens, counts
            )
        elif kind == "presence":
            penalty_rows.subtract_presence(
                view, penalizer.cumulated_presence_penalties, penalizer.presence_penalties, tokens, counts
            )
        elif kind == "repetition":
            penalty_rows.scale_repetition(
                view, penalizer.cumulated_repetition_penalties, penalizer.repetition_penalties, tokens, counts
            )
        else:
            penalty_rows.block_stops(
                view,
                penalizer.len_output_tokens,
                penalizer.min_new_tokens,
                penalizer.stop_token_penalties,
                depth,
            )


def grow_state(orchestrator: Any, tokens: torch.Tensor, accept_index: torch.Tensor) -> None:
    """Add the accepted candidates (the old bonus and the correct drafts) to every prepared penaliser.

    Args:
        orchestrator: upstream's penalisers of the batch.
        tokens: int64 ``[B, T]`` candidates.
        accept_index: int ``[B, D]``, accepted rows of the whole batch in path order, -1 where none.
    """
    valid = accept_index >= 0
    accepted = tokens.reshape(-1)[accept_index.clamp(min=0).long()]
    for kind, penalizer in _prepared(orchestrator):
        if kind == "frequency":
            penalty_rows.grow_frequency(
                penalizer.cumulated_frequency_penalties, penalizer.frequency_penalties, accepted, valid
            )
        elif kind == "presence":
            penalty_rows.grow_presence(
                penalizer.cumulated_presence_penalties, penalizer.presence_penalties, accepted, valid
            )
        elif kind == "repetition":
            penalty_rows.grow_presence(
                penalizer.cumulated_repetition_penalties, penalizer.repetition_penalties, accepted, valid
            )
        else:
            penalizer.len_output_tokens += valid.sum(-1, keepdim=True, dtype=torch.int32)


def _ordered(orchestrator: Any) -> list[Any]:
    def key(penalizer: Any) -> tuple[bool, str]:
        return bool(penalizer.is_multiplicative), type(penalizer).__name__

    return sorted(orchestrator.penalizers.values(), key=key)


def _prepared(orchestrator: Any) -> list[tuple[str, Any]]:
    """The penalisers in force with their kind, in the order in which they apply."""
    return [(_kind(p), p) for p in _ordered(orchestrator) if p.is_prepared()]


def _kind(penalizer: Any) -> str:
    for kind, attribute in (
        ("frequency", "frequency_penalties"),
        ("presence", "presence_penalties"),
        ("repetition", "repetition_penalties"),
        ("minimum", "min_new_tokens"),
    ):
        if hasattr(penalizer, attribute):
            return kind
    raise TypeError(
        f"penaliser {type(penalizer).__name__} has no per-row form; use one of frequency_penalty, "
        "presence_penalty, repetition_penalty, min_new_tokens, or switch off the topic run-penalties"
    )
