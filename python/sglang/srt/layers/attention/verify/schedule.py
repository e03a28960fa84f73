# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Which keys does a program read? Computed on the device from the lengths, so a captured graph adapts.

The grid of the split kernel is a fixed list of work items. The lengths of the whole batch decide one bound on
a split's keys: as small as fills the device in one wave, never below a measured minimum. Each request then takes
as many consecutive items as that bound asks for, evened out, and the rest of the grid has nothing to do. Long
requests get more splits than short ones, and a batch whose lengths change by 100x between replays keeps its
balance.

Items in use never exceed ``target`` plus one a request: the plan sizes grid and workspace by that.

The functions take ``lanes`` (0 .. power of two >= batch) from the caller because a Gluon kernel must choose its
layout, a Triton kernel must not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_keys(total, target, GRAIN: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Most keys a split may hold when the batch holds ``total`` keys: a multiple of GRAIN."""
    fair = (total + target - 1) // target
    return tl.maximum((fair + GRAIN - 1) // GRAIN * GRAIN, MIN_KEYS)


@triton.jit
def even_chunk(length, most, GRAIN: tl.constexpr):
    """Keys a split of a request, at most ``most``, so that its splits are as even as GRAIN allows.

    Without it a request of ``most`` + 1 keys has one full split and one of a single key.
    """
    count = tl.maximum((length + most - 1) // most, 1)
    return tl.maximum(((length + count - 1) // count + GRAIN - 1) // GRAIN * GRAIN, GRAIN)


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
        chunk = chunk_keys(length, target, GRAIN, MIN_KEYS)
        count = (length + chunk - 1) // chunk
    else:
        lengths = request_length(
            seq_lens, req_pool_indices, lanes, lanes < batch, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE
        )
        chunks = even_chunk(lengths, chunk_keys(tl.sum(lengths, 0), target, GRAIN, MIN_KEYS), GRAIN)
        counts = (lengths + chunks - 1) // chunks
        request = tl.sum((tl.cumsum(counts, 0) <= work).to(tl.int32), 0)
        here = lanes == request
        first = tl.sum(tl.where(lanes < request, counts, 0), 0)
        count = tl.sum(tl.where(here, counts, 0), 0)
        chunk = tl.sum(tl.where(here, chunks, 0), 0)
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
):
    """(first item, item count) of ``request``, by the same arithmetic as ``locate_work``."""
    if BATCH_LANES == 1:
        _, _, first, count, _, _ = locate_work(
            lanes, 0, seq_lens, req_pool_indices, batch, target,
            BATCH_LANES, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE, GRAIN, MIN_KEYS,
        )  # fmt: skip
    else:
        lengths = request_length(
            seq_lens, req_pool_indices, lanes, lanes < batch, TOKENS, LENS_INCLUDE_NEW, HAS_TABLE
        )
        chunks = even_chunk(lengths, chunk_keys(tl.sum(lengths, 0), target, GRAIN, MIN_KEYS), GRAIN)
        counts = (lengths + chunks - 1) // chunks
        first = tl.sum(tl.where(lanes < request, counts, 0), 0)
        count = tl.sum(tl.where(lanes == request, counts, 0), 0)
    return first, count
