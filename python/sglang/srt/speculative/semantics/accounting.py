"""Counters of a run that ends before its last accepted token.

Upstream counts the accepted tokens of a step before it knows where the request ends. What is dropped again
must leave no trace: not in the KV bookkeeping (the slots go back with the over-allocated ones), not in the
acceptance counters that ``meta_info`` and the metrics show.
"""

from __future__ import annotations

from typing import Any


def move_in_histogram(histogram: list[int], old: int, new: int) -> None:
    """Count one step under ``new`` correct drafts instead of ``old``, in place; trailing zeros are removed."""
    if old == new:
        return
    if new >= len(histogram):
        histogram.extend([0] * (new + 1 - len(histogram)))
    histogram[old] -= 1
    histogram[new] += 1
    while histogram and histogram[-1] == 0:
        histogram.pop()


def shorten_run(request: Any, result: Any, index: int, *, had: int, kept: int) -> None:
    """Make request and batch result say that only ``kept`` tokens of this step were committed.

    A kept draft token that ends the request takes the place of the bonus, so a run of ``kept`` tokens holds
    ``kept - 1`` correct drafts; the identity "output tokens = steps + correct drafts" stays true.

    Args:
        request: the upstream request, already credited with ``had`` tokens of KV.
        result: the batch result, with per-request correct drafts on the host.
        index: the request's place in the batch.
        had: tokens that upstream credited to the request's KV.
        kept: tokens that remain, at most ``had``.
    """
    request.kv_committed_len -= had - kept
    legal = getattr(result, "grammar_retained_tokens", None)
    if legal and legal[index] is not None:
        legal[index] = legal[index][:kept]
    recorded = result.num_correct_drafts_per_req_cpu[index]
    correct = max(kept - 1, 0)
    if correct == recorded:
        return
    request.spec_num_correct_drafts += correct - recorded
    move_in_histogram(request.spec_correct_drafts_histogram, recorded, correct)
    result.num_correct_drafts_per_req_cpu[index] = correct
    result.num_correct_drafts += correct - recorded
