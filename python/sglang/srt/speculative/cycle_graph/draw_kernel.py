# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""One token a row by a draw from the filtered distribution, without sorting; a row is shared by many programs.

The filters (docs/sampling.md) keep a front of the tokens ordered by probability, ties by token. A front is a threshold
and, of the tokens that equal it, how many. The threshold is found digit by digit in the bits of the weights: at each of
``LEVELS`` levels one launch sorts the weights that share the digits so far into ``BINS`` by the next one and sums every
bin, another chooses the bin (a radix selection). Weights are summed as integers, so a sum does not depend on its order,
and ranks that hold equal logits draw equal tokens. Rows without a filter leave the search at once, greedy rows also the
draw. The variates are those of ``sampled.coins``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Columns of a program, and how many of them it puts into bins at a time.
COLUMNS, SLICE, WARPS = 2048, 128, 4
# A digit of five bits; six of them are the 30 bits that a weight in (0, 1] has below its sign and its largest exponent bit.
DIGIT, LEVELS = 5, 6
BINS = 1 << DIGIT
# A weight of 1 as an integer, and where a bin's count begins above its sum: 2^11 columns of 2^39 stay below it.
SCALE, COUNT_AT = 39, 51
# Of a row: digits so far, count and sum of the weights above all that share them; the sum of all; the threshold.
FOUND, TOTAL_AT, LOW_AT = 5, 3, 4


@triton.jit
def _mix(value):
    """A 32-bit finaliser (the multiply-xorshift rounds of MurmurHash3)."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _coin(counter, row):
    """A uniform variate in [0, 1) of 53 bits: ``sampled.coins`` of one row."""
    base = counter.to(tl.uint32)
    step = (row + 1).to(tl.uint32) * 0x632BE5AB
    salt = base * 0x2545F491
    high = _mix(_mix(_mix(base ^ 0x9E3779B9) + step) ^ salt)
    low = _mix(_mix(_mix(base ^ 0x7F4A7C15) + step) ^ salt)
    return ((high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)).to(tl.float64) * (2.0**-53)


@triton.jit
def _bits(logits, column, columns, best, warmth):
    """Bits of exp((logit - best) / temperature), a number in [0, 1]; 0 behind the row's end."""
    value = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    # A temperature can be infinite in float32: then every number weighs 1, and -inf still nothing.
    weight = tl.where(value > float("-inf"), tl.exp((value - best) / warmth), 0.0)
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def _fixed(bits, SCALE: tl.constexpr):
    """The weight with these bits times 2^SCALE, cut to an integer."""
    shift = (bits >> 23) - (150 - SCALE)
    digits = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    return tl.where(
        shift >= 0, digits << tl.maximum(shift, 0).to(tl.int64), digits >> tl.minimum(-shift, 63).to(tl.int64)
    )


@triton.jit
def _best(peaks, row, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """The row's largest logit (NaN counts as +inf) from its programs' ones."""
    lane = tl.arange(0, LANES)
    return tl.max(tl.load(peaks + row * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _draws(top_k, best):
    """Is the row drawn at all? A greedy one is not, nor one that holds no numbers."""
    return (top_k > 1) & (best < float("inf")) & (best > float("-inf"))


@triton.jit
def _filters(top_k, top_p, least, columns):
    """Does a filter take tokens away from the row?"""
    return (top_k < columns) | (top_p < 1.0) | (least > 0.0)


@triton.jit
def _room(total, top_p):
    """How much weight may lie above a token that stays."""
    return tl.where(top_p < 1.0, (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), total)


@triton.jit
def peaks_kernel(
    logits,
    stride,
    columns,
    peaks,
    firsts,
    found,
    CHUNKS: tl.constexpr,
    COLS: tl.constexpr,
    FOUND: tl.constexpr,
):
    """Program (row, chunk): its largest logit, NaN as +inf, and the first column of it; level 0 of the search."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * COLS + tl.arange(0, COLS)
    value = tl.load(
        logits + row.to(tl.int64) * stride + column, mask=column < columns, other=float("-inf")
    ).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    tl.store(peaks + row * CHUNKS + chunk, tl.max(value, 0))
    tl.store(firsts + row * CHUNKS + chunk, chunk * COLS + tl.argmax(value, 0))
    if chunk == 0:
        zero = tl.full([], 0, tl.int64)
        tl.store(found + row * FOUND, zero)
        tl.store(found + row * FOUND + 1, zero)
        tl.store(found + row * FOUND + 2, zero)


@triton.jit
def level_kernel(
    logits, stride, columns, temperatures, top_ks, top_ps, min_ps, peaks, found, bins_before, bins,
    LEVEL: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr,
    SLICE: tl.constexpr, BINS: tl.constexpr, DIGIT: tl.constexpr, LEVELS: tl.constexpr, SCALE: tl.constexpr,
    COUNT_AT: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): bins of the next digit, of its weights that share the digits so far."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    request = row // WIDTH
    top_k, top_p, least = tl.load(top_ks + request), tl.load(top_ps + request), tl.load(min_ps + request)
    best = _best(peaks, row, CHUNKS, LANES)
    if _draws(top_k, best) & _filters(top_k, top_p, least, columns):
        SHIFT: tl.constexpr = DIGIT * (LEVELS - 1 - LEVEL)
        low = tl.load(found + row * FOUND).to(tl.int32)
        digit = tl.arange(0, BINS)
        mine = (row * CHUNKS + chunk) * BINS
        some = tl.full([], 1, tl.int64)
        if LEVEL > 0:
            # How many weights of this chunk share the digits: after a few of them most chunks have none.
            some = tl.load(bins_before + mine + ((low >> (SHIFT + DIGIT)) & (BINS - 1))) >> COUNT_AT
        parts = tl.zeros([SLICE, BINS], tl.int64)
        if some > 0:
            logits += row.to(tl.int64) * stride
            warmth = tl.load(temperatures + request)
            for start in range(0, COLS, SLICE):
                column = chunk * COLS + start + tl.arange(0, SLICE)
                bits = _bits(logits, column, columns, best, warmth)
                here = tl.where(column < columns, (bits - low) >> SHIFT, -1)
                packed = _fixed(bits, SCALE) + (1 << COUNT_AT)
                parts += tl.where(here[:, None] == digit[None, :], packed[:, None], 0)
        tl.store(bins + mine + digit, tl.sum(parts, 0))


@triton.jit
def narrow_kernel(
    columns, top_ks, top_ps, min_ps, peaks, found, bins,
    LEVEL: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, BINS: tl.constexpr,
    DIGIT: tl.constexpr, LEVELS: tl.constexpr, COUNT_AT: tl.constexpr, FOUND: tl.constexpr, TOTAL_AT: tl.constexpr,
):  # fmt: skip
    """Row r: the digit that level ``LEVEL``'s bins give, added to the digits so far, and what lies above all that share them.

    The threshold is the smallest number whose tokens still start within both limits: fewer than top-k tokens above it,
    and at most the room.
    """
    row = tl.program_id(0)
    request = row // WIDTH
    top_k, top_p, least = tl.load(top_ks + request), tl.load(top_ps + request), tl.load(min_ps + request)
    if _draws(top_k, _best(peaks, row, CHUNKS, LANES)) & _filters(top_k, top_p, least, columns):
        lane, digit = tl.arange(0, LANES), tl.arange(0, BINS)
        at = ((row * CHUNKS + lane) * BINS)[:, None] + digit[None, :]
        packed = tl.load(bins + at, mask=(lane < CHUNKS)[:, None], other=0)
        counts = tl.sum(packed >> COUNT_AT, 0)
        sums = tl.sum(packed & ((1 << COUNT_AT) - 1), 0)
        found += row * FOUND
        digits, count, heavier = tl.load(found), tl.load(found + 1), tl.load(found + 2)
        total = tl.sum(sums, 0)
        if LEVEL == 0:
            tl.store(found + TOTAL_AT, total)
        else:
            total = tl.load(found + TOTAL_AT)
        counts = count + tl.sum(counts, 0) - tl.cumsum(counts, 0)
        sums = heavier + tl.sum(sums, 0) - tl.cumsum(sums, 0)
        # Nothing that counts is above the last bin, or it would not have been chosen.
        ok = (counts < top_k) & (sums <= _room(total, top_p))
        chosen = tl.min(tl.where(ok, digit, BINS - 1), 0)
        tl.store(found, digits + (chosen.to(tl.int64) << (DIGIT * (LEVELS - 1 - LEVEL))))
        tl.store(found + 1, tl.sum(tl.where(digit == chosen, counts, 0), 0))
        tl.store(found + 2, tl.sum(tl.where(digit == chosen, sums, 0), 0))


@triton.jit
def shares_kernel(
    logits, stride, columns, temperatures, top_ks, top_ps, min_ps, peaks, found, shares,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr, SCALE: tl.constexpr,
    FOUND: tl.constexpr, LOW_AT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the threshold; of its weights the sum and count above it, and how many equal it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    request = row // WIDTH
    top_k, top_p, least = tl.load(top_ks + request), tl.load(top_ps + request), tl.load(min_ps + request)
    best = _best(peaks, row, CHUNKS, LANES)
    if _draws(top_k, best):
        low = tl.maximum(least, 0.0).to(tl.int32, bitcast=True)
        if _filters(top_k, top_p, least, columns):
            low = tl.maximum(low, tl.load(found + row * FOUND).to(tl.int32))
        column = chunk * COLS + tl.arange(0, COLS)
        bits = _bits(
            logits + row.to(tl.int64) * stride, column, columns, best, tl.load(temperatures + request)
        )
        above = bits > low
        mine = shares + (row * CHUNKS + chunk) * 3
        tl.store(mine, tl.sum(tl.where(above, _fixed(bits, SCALE), 0), 0))
        tl.store(mine + 1, tl.sum(above.to(tl.int64), 0))
        tl.store(mine + 2, tl.sum(((bits == low) & (column < columns)).to(tl.int64), 0))
        if chunk == 0:
            tl.store(found + row * FOUND + LOW_AT, low.to(tl.int64))


@triton.jit
def token_kernel(
    state, logits, stride, columns, temperatures, top_ks, top_ps, min_ps, peaks, firsts, found, shares, maxima, indices,
    scratch_stride, WIDTH: tl.constexpr, COUNTER: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, SCALE: tl.constexpr, FOUND: tl.constexpr, TOTAL_AT: tl.constexpr, LOW_AT: tl.constexpr,
):  # fmt: skip
    """Row r: its largest logit and its token, in the chunk where the variate falls."""
    row = tl.program_id(0)
    request = row // WIDTH
    lane = tl.arange(0, LANES)
    peak = tl.load(peaks + row * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf"))
    best = tl.max(peak, 0)
    tl.store(maxima + row * scratch_stride, best)
    token = tl.load(firsts + row * CHUNKS + tl.argmax(peak, 0))
    top_k = tl.load(top_ks + request)
    if _draws(top_k, best):
        mine = shares + (row * CHUNKS + lane) * 3
        sums = tl.load(mine, mask=lane < CHUNKS, other=0)
        equals = tl.load(mine + 2, mask=lane < CHUNKS, other=0)
        heavier = tl.sum(sums, 0)
        above = tl.sum(tl.load(mine + 1, mask=lane < CHUNKS, other=0), 0)
        low = tl.load(found + row * FOUND + LOW_AT).to(tl.int32)
        value = _fixed(low, SCALE)
        # Tokens that equal the threshold and stay: by their number, and by the room that is left in front of the last.
        ties = tl.minimum(tl.sum(equals, 0), top_k - above)
        top_p, least = tl.load(top_ps + request), tl.load(min_ps + request)
        if _filters(top_k, top_p, least, columns) & (value > 0):
            room = _room(tl.load(found + row * FOUND + TOTAL_AT), top_p)
            ties = tl.minimum(ties, (room - heavier) // tl.maximum(value, 1) + 1)
        kept = heavier + ties * value
        goal = tl.minimum((_coin(tl.load(state + COUNTER), row) * kept.to(tl.float64)).to(tl.int64), kept - 1)
        earlier = tl.cumsum(equals, 0) - equals
        sums += tl.minimum(tl.maximum(ties - earlier, 0), equals) * value
        reached = tl.cumsum(sums, 0)
        chunk = tl.min(tl.where(reached > goal, lane, CHUNKS - 1), 0)
        goal -= tl.sum(tl.where(lane < chunk, sums, 0), 0)
        ties -= tl.sum(tl.where(lane < chunk, equals, 0), 0)
        column = chunk * COLS + tl.arange(0, COLS)
        bits = _bits(
            logits + row.to(tl.int64) * stride, column, columns, best, tl.load(temperatures + request)
        )
        same = (bits == low) & (column < columns)
        stays = (bits > low) | (same & (tl.cumsum(same.to(tl.int64), 0) <= ties))
        weight = tl.where(stays, _fixed(bits, SCALE), 0)
        token = tl.min(tl.where((weight > 0) & (tl.cumsum(weight, 0) > goal), column, columns), 0)
    tl.store(indices + row * scratch_stride, token)


def draw(
    state: torch.Tensor,
    counter_at: int,
    logits: torch.Tensor,
    sampling: Any,
    maxima: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Draw every row of ``logits`` [B * W, V] for the B requests of ``sampling``; 2 ``LEVELS`` + 3 launches.

    Args:
        state: int32, holds the cycle's number at ``counter_at``.
        counter_at: see ``state``.
        logits: dense rows, V at most 2^23: sums are integers of 62 bits.
        sampling: ``buffers.Sampling``.
        maxima: float32 [B * W, P], the first column is written.
        indices: int32 [B * W, P], the first column is written.

    Scratch comes from PyTorch's allocator, in a capture from the graph's own memory, like an activation.
    """
    rows, columns = logits.shape
    chunks = triton.cdiv(columns, COLUMNS)
    device = logits.device
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    firsts = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    found = torch.empty(rows, FOUND, dtype=torch.int64, device=device)
    bins = torch.empty(2, rows, chunks, BINS, dtype=torch.int64, device=device)
    shares = torch.empty(rows, chunks, 3, dtype=torch.int64, device=device)
    row = (logits, logits.stride(0), columns)
    asked = (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps)
    width = rows // sampling.temperatures.shape[0]
    lanes = max(2, triton.next_power_of_2(chunks))
    grid = (rows, chunks)
    fit: dict[str, Any] = {"CHUNKS": chunks, "FOUND": FOUND, "num_warps": WARPS}
    peaks_kernel[grid](*row, peaks, firsts, found, COLS=COLUMNS, **fit)
    fit |= {"WIDTH": width, "LANES": lanes}
    digits = {"BINS": BINS, "DIGIT": DIGIT, "LEVELS": LEVELS, "COUNT_AT": COUNT_AT}
    for level in range(LEVELS):
        before, after = bins[level % 2 ^ 1], bins[level % 2]
        level_kernel[grid](
            *row, *asked, peaks, found, before, after,
            LEVEL=level, COLS=COLUMNS, SLICE=min(SLICE, COLUMNS), SCALE=SCALE, **digits, **fit,
        )  # fmt: skip
        narrow_kernel[(rows,)](
            columns, *asked[1:], peaks, found, after, LEVEL=level, TOTAL_AT=TOTAL_AT, **digits, **fit
        )
    ends = {"COLS": COLUMNS, "SCALE": SCALE, "LOW_AT": LOW_AT}
    shares_kernel[grid](*row, *asked, peaks, found, shares, **ends, **fit)
    token_kernel[(rows,)](
        state, *row, *asked, peaks, firsts, found, shares, maxima, indices, maxima.stride(0),
        COUNTER=counter_at, TOTAL_AT=TOTAL_AT, **ends, **fit,
    )  # fmt: skip
