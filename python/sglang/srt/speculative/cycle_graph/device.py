# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Device code of the glue: what ``kernels`` launches. Each kernel equals a step of ``steps`` or a part of one."""

from __future__ import annotations

import triton
import triton.language as tl
from sglang.srt.speculative.cycle_graph.accept import FIXED_TOKEN
from sglang.srt.speculative.cycle_graph.buffers import MARKS

_FIXED = tl.constexpr(FIXED_TOKEN)
_MARKS = tl.constexpr(MARKS)


@triton.jit
def mark(marks, slot, BOUNDARY: tl.constexpr, TIMED: tl.constexpr):
    if TIMED:
        tl.store(marks + slot * _MARKS + BOUNDARY, tl.extra.cuda.globaltimer().to(tl.int64))


@triton.jit
def mark_kernel(state, marks, BOUNDARY: tl.constexpr, TIMED: tl.constexpr):
    mark(marks, tl.load(state + 1), BOUNDARY, TIMED)


# Numbers that change from cycle to cycle are not looked at by the compiler: it would make, or load, another kernel for each
# mixture of ones, multiples of 16 and others, in the first cycles of a server.
@triton.jit(do_not_specialize=["live", "slot", "simulated", "counter", "batch"])
def load_kernel(rows, live, slot, simulated, counter, state, mine, batch, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < live, other=0)
    tl.store(mine + index, row.to(tl.int64), mask=index < batch)
    value = tl.where(index == 0, live, tl.where(index == 1, slot, tl.where(index == 2, simulated, counter)))
    tl.store(state + index, value.to(tl.int32), mask=index < 4)


@triton.jit(do_not_specialize=["live", "batch"])
def load_sampling_kernel(
    live,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    my_temperatures,
    my_top_ks,
    my_top_ps,
    my_min_ps,
    batch,
    BLOCK: tl.constexpr,
):
    index = tl.arange(0, BLOCK)
    here, inside = index < live, index < batch
    tl.store(my_temperatures + index, tl.load(temperatures + index, mask=here, other=1.0), mask=inside)
    tl.store(my_top_ks + index, tl.load(top_ks + index, mask=here, other=1).to(tl.int32), mask=inside)
    tl.store(my_top_ps + index, tl.load(top_ps + index, mask=here, other=1.0), mask=inside)
    tl.store(my_min_ps + index, tl.load(min_ps + index, mask=here, other=0.0), mask=inside)


@triton.jit
def begin_kernel(
    state,
    rows,
    table,
    table_stride,
    relay_lengths,
    relay_bonus,
    relay_token,
    relay_hidden,
    prefix,
    bonus,
    draft_rows,
    verify_rows,
    extend_rows,
    draft_lens,
    draft_positions,
    draft_slots,
    draft_token,
    draft_probability,
    draft_hidden,
    hidden_size,
    marks,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PAD: tl.constexpr,
    TIMED: tl.constexpr,
    COLS: tl.constexpr,
):
    request = tl.program_id(0)
    part = tl.program_id(1)
    live = request < tl.load(state)
    row = tl.load(rows + request)
    if part == 0:
        if request == 0:
            mark(marks, tl.load(state + 1), 0, TIMED)
        length = tl.where(live, tl.load(relay_lengths + row), PAD)
        tl.store(prefix + request, length)
        tl.store(bonus + request, tl.where(live, tl.load(relay_bonus + row), 0))
        tl.store(draft_rows + request, row)
        tl.store(verify_rows + request, row)
        tl.store(extend_rows + request, row)
        tl.store(draft_lens + request, length)
        tl.store(draft_positions + request, tl.where(live, length, 0))
        tl.store(draft_token + request, tl.where(live, tl.load(relay_token + row), 0))
        tl.store(draft_probability + request, 1.0)
        lane = tl.arange(0, LANES)
        inside = lane < STEPS
        slot = tl.load(table + row * table_stride + length + lane, mask=inside & live, other=0)
        tl.store(draft_slots + request * STEPS + lane, slot.to(tl.int64), mask=inside)
    column = part * COLS + tl.arange(0, COLS)
    inside = column < hidden_size
    value = tl.load(relay_hidden + row * hidden_size + column, mask=inside & live, other=0.0)
    tl.store(draft_hidden + request * hidden_size + column, value, mask=inside)


@triton.jit
def verify_inputs_kernel(
    state,
    rows,
    table,
    table_stride,
    prefix,
    bonus,
    proposed,
    tokens,
    lens,
    verify_positions,
    verify_slots,
    extend_positions,
    extend_slots,
    marks,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TIMED: tl.constexpr,
):
    request = tl.program_id(0)
    if request == 0:
        mark(marks, tl.load(state + 1), 1, TIMED)
    live = request < tl.load(state)
    row = tl.load(rows + request)
    length = tl.load(prefix + request)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    draft = tl.load(proposed + request * (WIDTH - 1) + lane - 1, mask=(lane > 0) & inside & live, other=0)
    first = tl.load(bonus + request)
    place = request * WIDTH + lane
    token = tl.where(live, tl.where(lane == 0, first, draft), 0)
    tl.store(tokens + place, token, mask=inside)
    tl.store(lens + request, length)
    position = tl.where(live, length + lane, 0)
    tl.store(verify_positions + place, position, mask=inside)
    tl.store(extend_positions + place, position, mask=inside)
    slot = tl.load(table + row * table_stride + length + lane, mask=inside & live, other=0).to(tl.int64)
    tl.store(verify_slots + place, slot, mask=inside)
    tl.store(extend_slots + place, slot, mask=inside)


@triton.jit
def maxima_kernel(
    state,
    logits,
    stride,
    columns,
    maxima,
    indices,
    source,
    target,
    width,
    marks,
    PARTS: tl.constexpr,
    TIMED: tl.constexpr,
    COLS: tl.constexpr,
):
    """Partial maxima of each row in the first ``PARTS`` programs; the rest copy the row's hidden state."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if (row == 0) & (part == 0):
        mark(marks, tl.load(state + 1), 2, TIMED)
    if part < PARTS:
        column = part * COLS + tl.arange(0, COLS)
        value = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf"))
        value = value.to(tl.float32)
        # NaN must win, as it does in torch, so that the row is seen to be bad.
        value = tl.where(value == value, value, float("inf"))
        tl.store(maxima + row * PARTS + part, tl.max(value, 0))
        tl.store(indices + row * PARTS + part, part * COLS + tl.argmax(value, 0))
    else:
        column = (part - PARTS) * COLS + tl.arange(0, COLS)
        inside = column < width
        state_row = tl.load(source + row * width + column, mask=inside)
        tl.store(target + row * width + column, state_row, mask=inside)


@triton.jit
def accept_kernel(
    state,
    rows,
    maxima,
    indices,
    stride,
    candidates,
    prefix,
    kept_out,
    relay_lengths,
    relay_bonus,
    extend_tokens,
    extend_lens,
    extend_correct,
    extend_accepted,
    extend_widths,
    result_tokens,
    result_lengths,
    result_good,
    marks,
    batch,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
    PAD: tl.constexpr,
    REAL_TOKENS: tl.constexpr,
    TIMED: tl.constexpr,
):
    request = tl.program_id(0)
    live = request < tl.load(state)
    slot = tl.load(state + 1)
    simulated = tl.load(state + 2)
    row = tl.load(rows + request)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    part = tl.arange(0, PART_LANES)
    at = (request * WIDTH + lane)[:, None] * stride + part[None, :]
    here = inside[:, None] & (part < PARTS)[None, :]
    maximum = tl.load(maxima + at, mask=here, other=float("-inf"))
    index = tl.load(indices + at, mask=here, other=0)
    top = tl.max(maximum, 1)
    first = tl.argmax(maximum, 1)
    chosen = tl.sum(tl.where(part[None, :] == first[:, None], index, 0), 1)

    place = request * WIDTH + lane
    following = tl.load(candidates + place + 1, mask=lane < WIDTH - 1, other=-1).to(tl.int32)
    agrees = (chosen == following) & (lane < WIDTH - 1)
    correct = tl.min(tl.where(agrees, LANES, lane), 0)
    token = tl.where(lane <= correct, chosen, 0)
    if simulated > 0:
        if REAL_TOKENS:
            path = tl.where(lane < simulated - 1, following, chosen)
            token = tl.where(lane < simulated, path, token)
        else:
            token = tl.zeros_like(token) + _FIXED
        correct = simulated - 1
    fine = (top > float("-inf")) & (top < float("inf"))
    good = tl.minimum(tl.min(tl.where(fine, LANES, lane), 0), correct + 1)
    last = tl.sum(tl.where(lane == correct, token, 0), 0)
    length = tl.load(prefix + request)

    tl.store(kept_out + request, tl.where(live, correct + 1, 1))
    tl.store(extend_tokens + place, tl.where(live, token, 0).to(tl.int64), mask=inside)
    tl.store(extend_lens + request, tl.where(live, length + WIDTH, PAD))
    tl.store(extend_correct + request, tl.where(live, correct, WIDTH))
    tl.store(extend_accepted + request, tl.where(live, correct + 1, WIDTH))
    tl.store(extend_widths + request, WIDTH)
    if live:
        tl.store(relay_lengths + row, length + correct + 1)
        tl.store(relay_bonus + row, last.to(tl.int64))
        tl.store(result_tokens + slot * batch * WIDTH + place, token, mask=inside)
        tl.store(result_lengths + slot * batch + request, correct + 1)
        tl.store(result_good + slot * batch + request, good)
    if request == 0:
        mark(marks, slot, 3, TIMED)


@triton.jit
def draft_maxima_kernel(
    kept,
    logits,
    stride,
    columns,
    maxima,
    indices,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Partial maxima of the draft's row behind the last accepted token."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    row = (request * WIDTH + tl.load(kept + request) - 1).to(tl.int64)
    column = part * COLS + tl.arange(0, COLS)
    value = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    tl.store(maxima + request * PARTS + part, tl.max(value, 0))
    tl.store(indices + request * PARTS + part, part * COLS + tl.argmax(value, 0))


@triton.jit
def relay_kernel(
    state,
    rows,
    kept,
    maxima,
    indices,
    states,
    relay_token,
    relay_probability,
    relay_hidden,
    hidden_size,
    marks,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
    TIMED: tl.constexpr,
    COLS: tl.constexpr,
):
    request = tl.program_id(0)
    part = tl.program_id(1)
    if request < tl.load(state):
        row = tl.load(rows + request)
        if part == 0:
            lane = tl.arange(0, PART_LANES)
            at = request * PARTS + lane
            maximum = tl.load(maxima + at, mask=lane < PARTS, other=float("-inf"))
            index = tl.load(indices + at, mask=lane < PARTS, other=0)
            first = tl.argmax(maximum, 0)
            tl.store(relay_token + row, tl.sum(tl.where(lane == first, index, 0), 0).to(tl.int64))
            tl.store(relay_probability + row, 1.0)
            if request == 0:
                mark(marks, tl.load(state + 1), 4, TIMED)
        column = part * COLS + tl.arange(0, COLS)
        inside = column < hidden_size
        source = (request * WIDTH + tl.load(kept + request) - 1).to(tl.int64)
        value = tl.load(states + source * hidden_size + column, mask=inside)
        tl.store(relay_hidden + row * hidden_size + column, value, mask=inside)
