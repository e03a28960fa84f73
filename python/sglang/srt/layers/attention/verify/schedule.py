# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Which keys does a program read? Computed on the device from the lengths, so a captured graph adapts.

The grid of the split kernel is a fixed list of work items. The lengths of the whole batch decide one chunk
size (keys a split): as small as fills the device in one wave, never below a measured minimum. Request b then
takes ceil(L_b / chunk) consecutive items and the rest of the grid exits at once. Long requests get more splits
than short ones, and a batch whose lengths change by 100x between replays keeps its balance.

Items in use never exceed ``target`` plus one a request: the plan sizes grid and workspace by that.

The functions take ``lanes`` (0 .. power of two >= batch) from the caller because a Gluon kernel must choose its
layout, a Triton kernel must not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_keys(
    total,
    target,
    GRAIN: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SHORT_KEYS: tl.constexpr,
    SHORT_MIN: tl.constexpr,
):
    """Keys a split when the batch holds ``total`` keys: a multiple of GRAIN.

    Batches of at most SHORT_KEYS keys use SHORT_MIN as the smallest chunk: there latency rules, and half a
    tile arrives sooner than a whole one.
    """
    fair = (total + target - 1) // target
    fair = (fair + GRAIN - 1) // GRAIN * GRAIN
    least = tl.where(total <= SHORT_KEYS, SHORT_MIN, MIN_KEYS)
    return tl.maximum(fair, least)


@triton.jit
def request_length(
    seq_lens,
    req_pool_indices,
    b,
    live,
    TOKENS: tl.constexpr,
    LENS_INCLUDE_NEW: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Keys of request(s) ``b``, new tokens included; 0 for padding and for lanes that are not ``live``."""
    length = tl.load(seq_lens + b, mask=live, other=0).to(tl.int32)
    if not LENS_INCLUDE_NEW:
        length += TOKENS
    if HAS_TABLE:
        length = tl.where(tl.load(req_pool_indices + b, mask=live, other=-1) < 0, 0, length)
    return tl.where(live, tl.maximum(length, 0), 0)


@triton.jit
def locate_work(
    lanes,
    work,
    seq_lens,
    req_pool_indices,
    batch,
    target,
    BATCH_LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LENS_INCLUDE_NEW: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    GRAIN: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SHORT_KEYS: tl.constexpr,
    SHORT_MIN: tl.constexpr,
):
    """(request, its pool index, first item, item count, length, keys a split) of work item ``work``.

    An item beyond the used part of the grid gets length 0. The pool index comes along so that its load runs
    beside that of the lengths; it is 0 without a request table.
    """
    if BATCH_LANES == 1:
        # One request: no search, and every load has a constant address.
        request = 0
        first = 0
        length = tl.load(seq_lens).to(tl.int32)
        if not LENS_INCLUDE_NEW:
            length += TOKENS
        pool_index = 0
        if HAS_TABLE:
            pool_index = tl.load(req_pool_indices).to(tl.int32)
            length = tl.where(pool_index < 0, 0, length)
        length = tl.maximum(length, 0)
        chunk = chunk_keys(length, target, GRAIN, MIN_KEYS, SHORT_KEYS, SHORT_MIN)
        count = (length + chunk - 1) // chunk
    else:
        lengths = request_length(
            seq_lens, req_pool_indices, lanes, lanes < batch, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE
        )
        chunk = chunk_keys(tl.sum(lengths, 0), target, GRAIN, MIN_KEYS, SHORT_KEYS, SHORT_MIN)
        counts = (lengths + chunk - 1) // chunk
        request = tl.sum((tl.cumsum(counts, 0) <= work).to(tl.int32), 0)
        here = lanes == request
        first = tl.sum(tl.where(lanes < request, counts, 0), 0)
        count = tl.sum(tl.where(here, counts, 0), 0)
        length = tl.sum(tl.where(here, lengths, 0), 0)
        pool_index = 0
        if HAS_TABLE:
            indices = tl.load(req_pool_indices + lanes, mask=lanes < batch, other=0).to(tl.int32)
            pool_index = tl.sum(tl.where(here, indices, 0), 0)
    return request, pool_index, first, count, length, chunk


@triton.jit
def locate_request(
    lanes,
    request,
    seq_lens,
    req_pool_indices,
    batch,
    target,
    BATCH_LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LENS_INCLUDE_NEW: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    GRAIN: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SHORT_KEYS: tl.constexpr,
    SHORT_MIN: tl.constexpr,
):
    """(first item, item count) of ``request``, by the same arithmetic as ``locate_work``."""
    if BATCH_LANES == 1:
        _, _, first, count, _, _ = locate_work(
            lanes, 0, seq_lens, req_pool_indices, batch, target,
            BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS, SHORT_KEYS, SHORT_MIN,
        )  # fmt: skip
    else:
        lengths = request_length(
            seq_lens, req_pool_indices, lanes, lanes < batch, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE
        )
        chunk = chunk_keys(tl.sum(lengths, 0), target, GRAIN, MIN_KEYS, SHORT_KEYS, SHORT_MIN)
        counts = (lengths + chunk - 1) // chunk
        first = tl.sum(tl.where(lanes < request, counts, 0), 0)
        count = tl.sum(tl.where(lanes == request, counts, 0), 0)
    return first, count
