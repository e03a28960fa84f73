# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""One token a row by a draw from the filtered distribution, without sorting: one launch, one program a row.

The filters (docs/sampling.md) keep a front of the tokens ordered by probability, ties by token. A front is a threshold
and, of the tokens that equal it, how many: both are found by search over the bit patterns of the weights, four parts a
pass. Rows without a filter skip the search, greedy rows also the draw. The sums run in float64 and in a fixed order,
so ranks that hold equal logits draw equal tokens. The variates are those of ``sampled.coins``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS, WARPS = 4096, 16


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
def _weights(logits, column, columns, best, warmth):
    """exp((logit - best) / temperature) in (0, 1], 0 behind the row's end."""
    value = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return tl.exp((value - best) / warmth)


@triton.jit
def _above(weight, pivot):
    """How many weights have larger bits than ``pivot``, and their sum."""
    here = weight.to(tl.int32, bitcast=True) > pivot
    return tl.sum(here.to(tl.int32), 0), tl.sum(tl.where(here, weight, 0.0).to(tl.float64), 0)


@triton.jit
def draw_kernel(
    state,
    logits,
    stride,
    columns,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    maxima,
    indices,
    scratch_stride,
    WIDTH: tl.constexpr,
    COUNTER: tl.constexpr,
    COLS: tl.constexpr,
):
    """Row r: its largest logit (NaN as +inf) and its token."""
    row = tl.program_id(0)
    request = row // WIDTH
    logits += row.to(tl.int64) * stride
    lane = tl.arange(0, COLS)
    best = tl.full([], float("-inf"), tl.float32)
    first = tl.full([], 0, tl.int32)
    for start in range(0, columns, COLS):
        value = tl.load(logits + start + lane, mask=start + lane < columns, other=float("-inf")).to(
            tl.float32
        )
        value = tl.where(value == value, value, float("inf"))
        top = tl.max(value, 0)
        if top > best:
            first = start + tl.argmax(value, 0)
            best = top
    tl.store(maxima + row * scratch_stride, best)
    top_k = tl.load(top_ks + request)
    token = first
    if (top_k > 1) & (best < float("inf")) & (best > float("-inf")):
        warmth = tl.load(temperatures + request)
        total = tl.full([], 0.0, tl.float64)
        for start in range(0, columns, COLS):
            total += tl.sum(_weights(logits, start + lane, columns, best, warmth).to(tl.float64), 0)
        top_p = tl.load(top_ps + request)
        least = tl.load(min_ps + request)
        room = top_p.to(tl.float64) * total
        # Bits of the threshold, tokens that equal it and stay, and the weight of all that stay.
        low = tl.maximum(least, 0.0).to(tl.int32, bitcast=True)
        ties = columns
        kept = total
        if (top_k < columns) | (top_p < 1.0) | (least > 0.0):
            # ``high`` always qualifies: nothing is above the largest weight, which is 1.
            high = tl.maximum(low, tl.full([], 1.0, tl.float32).to(tl.int32, bitcast=True))
            while low < high:
                part = (high - low) // 4
                a, b, c = low + part, low + 2 * part, low + 3 * part
                count_a, count_b, count_c = 0, 0, 0
                mass_a = tl.full([], 0.0, tl.float64)
                mass_b, mass_c = mass_a, mass_a
                for start in range(0, columns, COLS):
                    weight = _weights(logits, start + lane, columns, best, warmth)
                    count, mass = _above(weight, a)
                    count_a, mass_a = count_a + count, mass_a + mass
                    count, mass = _above(weight, b)
                    count_b, mass_b = count_b + count, mass_b + mass
                    count, mass = _above(weight, c)
                    count_c, mass_c = count_c + count, mass_c + mass
                # The smallest value whose tokens still start within both limits.
                if (count_a < top_k) & (mass_a <= room):
                    high = a
                elif (count_b < top_k) & (mass_b <= room):
                    low = a + 1
                    high = b
                elif (count_c < top_k) & (mass_c <= room):
                    low = b + 1
                    high = c
                else:
                    low = c + 1
            above = 0
            heavier = tl.full([], 0.0, tl.float64)
            equal = 0
            for start in range(0, columns, COLS):
                weight = _weights(logits, start + lane, columns, best, warmth)
                count, mass = _above(weight, low)
                above, heavier = above + count, heavier + mass
                same = (weight.to(tl.int32, bitcast=True) == low) & (start + lane < columns)
                equal += tl.sum(same.to(tl.int32), 0)
            value = low.to(tl.float32, bitcast=True).to(tl.float64)
            ties = tl.minimum(equal, top_k - above)
            if value > 0.0:
                ties = tl.minimum(ties.to(tl.float64), tl.floor((room - heavier) / value) + 1.0).to(tl.int32)
            kept = heavier + ties.to(tl.float64) * value
        target = _coin(tl.load(state + COUNTER), row) * kept
        done = tl.full([], 0.0, tl.float64)
        seen = 0
        found = tl.full([], -1, tl.int32)
        last = first
        for start in range(0, columns, COLS):
            weight = _weights(logits, start + lane, columns, best, warmth)
            bits = weight.to(tl.int32, bitcast=True)
            same = (bits == low) & (start + lane < columns)
            rank = seen + tl.cumsum(same.to(tl.int32), 0)
            stays = ((bits > low) | (same & (rank <= ties))) & (weight > 0.0)
            mass = tl.where(stays, weight, 0.0).to(tl.float64)
            reached = done + tl.cumsum(mass, 0)
            hit = tl.min(tl.where(stays & (reached > target), start + lane, columns), 0)
            if (found < 0) & (hit < columns):
                found = hit
            # Rounding can leave the product at the full sum: the last token that stays takes it.
            last = tl.maximum(last, tl.max(tl.where(stays, start + lane, 0), 0))
            seen += tl.sum(same.to(tl.int32), 0)
            done += tl.sum(mass, 0)
        token = tl.where(found >= 0, found, last)
    tl.store(indices + row * scratch_stride, token)


def draw(
    state: torch.Tensor,
    counter_at: int,
    logits: torch.Tensor,
    sampling: Any,
    maxima: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Draw every row of ``logits`` [B * W, V] for the B requests of ``sampling``; one launch.

    Args:
        state: int32, holds the cycle's number at ``counter_at``.
        counter_at: see ``state``.
        logits: dense rows.
        sampling: ``buffers.Sampling``.
        maxima: float32 [B * W, P], the first column is written.
        indices: int32 [B * W, P], the first column is written.
    """
    draw_kernel[(logits.shape[0],)](
        state, logits, logits.stride(0), logits.shape[1], sampling.temperatures, sampling.top_ks, sampling.top_ps,
        sampling.min_ps, maxima, indices, maxima.stride(0),
        WIDTH=logits.shape[0] // sampling.temperatures.shape[0], COUNTER=counter_at, COLS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
