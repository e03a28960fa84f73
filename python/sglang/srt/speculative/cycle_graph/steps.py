"""The glue between the passes in PyTorch, for any device: what the kernels must equal, and what a CPU runs."""

from __future__ import annotations

import time
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph import accept as accepting
from sglang.srt.speculative.cycle_graph import sampled
from sglang.srt.speculative.cycle_graph.buffers import LIVE, PAD_LENGTH, SIMULATED, SLOT, CycleBuffers


def load(buffers: CycleBuffers, rows: torch.Tensor, slot: int, simulated: int, counter: int = 0) -> None:
    """Point the cycle at a batch: the only step outside the graph.

    Args:
        rows: int [n], rows of the live requests, n at most ``buffers.batch``.
        slot: where the results go, 0 to ``RING`` - 1.
        simulated: accept length to pretend, 0 for the real one.
        counter: number of the cycle, the same on all ranks; sampled cycles draw by it.
    """
    live = rows.shape[0]
    buffers.control.rows.zero_()
    buffers.control.rows[:live] = rows
    state = torch.tensor([live, slot, simulated, counter], dtype=torch.int32)
    buffers.control.state.copy_(state)


def load_sampling(buffers: CycleBuffers, info: Any) -> None:
    """Copy a batch's parameters: temperatures [n, 1], top_ks, top_ps and min_ps [n]; padding is made greedy."""
    mine = buffers.sampling
    assert mine is not None
    for target, source, padding in (
        (mine.temperatures, info.temperatures.view(-1), 1.0),
        (mine.top_ks, info.top_ks, 1),
        (mine.top_ps, info.top_ps, 1.0),
        (mine.min_ps, info.min_ps, 0.0),
    ):
        target.fill_(padding)
        target[: source.shape[0]] = source


def begin(buffers: CycleBuffers) -> None:
    """Gather the live requests' relay entries into the draft's inputs; padding gets harmless ones."""
    b, live = buffers, _live(buffers)
    rows, relay = b.control.rows, b.relay
    prefix = torch.where(live, relay.lengths[rows], PAD_LENGTH)
    b.scratch.prefix.copy_(prefix)
    b.scratch.bonus.copy_(torch.where(live, relay.bonus[rows], 0))
    for mine in (b.draft.rows, b.verify.rows, b.extend.rows):
        if mine.data_ptr() != rows.data_ptr():
            mine.copy_(rows)
    b.draft.lens.copy_(prefix)
    b.draft.positions.copy_(torch.where(live, prefix, 0))
    b.draft.slots.copy_(_slots(b, b.steps).flatten())
    b.draft.token.copy_(torch.where(live.unsqueeze(1), relay.token[rows], 0))
    b.draft.probability.fill_(1.0)
    b.draft.hidden.copy_(torch.where(live.unsqueeze(1), relay.hidden[rows], 0))
    _mark(b, 0)


def verify_inputs(buffers: CycleBuffers) -> None:
    """Lay bonus and drafts out as the rows of the verify; draft extend has the same positions and slots."""
    b, live = buffers, _live(buffers).unsqueeze(1)
    tokens = torch.cat([b.scratch.bonus.unsqueeze(1), b.draft.proposed], dim=1)
    b.verify.tokens.copy_(torch.where(live, tokens, 0).flatten())
    row = torch.arange(b.width, device=tokens.device)
    positions = torch.where(live, b.scratch.prefix.unsqueeze(1) + row, 0).flatten()
    slots = _slots(b, b.width).flatten()
    for inputs in (b.verify, b.extend):
        inputs.positions.copy_(positions)
        inputs.slots.copy_(slots)
    b.verify.lens.copy_(b.scratch.prefix)
    _mark(b, 1)


def accept(buffers: CycleBuffers) -> None:
    """Accept along the target's argmax or draw; fill results, relay and the inputs of draft extend."""
    _mark(buffers, 2)
    b = buffers
    if b.sampling is not None:
        sampled.draw_rows(b)
        settle(
            b,
            b.scratch.indices[:, 0].view(b.batch, b.width).long(),
            b.scratch.maxima[:, 0].view(b.batch, b.width),
        )
        _mark(b, 3)
        return
    number = torch.where(torch.isnan(b.verify.logits), float("inf"), b.verify.logits.float())
    maxima, chosen = number.max(dim=1)
    # ``max`` may name any of several equal columns; the first is what argmax gives.
    chosen = torch.where(number == maxima.unsqueeze(1), 1, 0).argmax(dim=1)
    settle(b, chosen.view(b.batch, b.width), maxima.view(b.batch, b.width))
    _mark(b, 3)


def settle(buffers: CycleBuffers, chosen: torch.Tensor, maxima: torch.Tensor) -> None:
    """What follows from the target's choices, int [B, W], and the largest logit of each row, float [B, W]."""
    b, live = buffers, _live(buffers)
    count, slot, simulated = (int(b.control.state[place]) for place in (LIVE, SLOT, SIMULATED))
    candidates = b.verify.tokens.view(b.batch, b.width)
    if simulated:
        outcome = accepting.simulate(candidates, chosen, simulated, b.real_tokens)
    else:
        outcome = accepting.accept_chain(candidates, chosen)
    good = accepting.good_prefix(maxima, outcome.kept)
    b.results.tokens[slot].copy_(outcome.tokens.flatten())
    b.results.lengths[slot].copy_(outcome.kept)
    b.results.good[slot].copy_(good)
    rows = b.control.rows[:count]
    b.relay.lengths[rows] = (b.scratch.prefix + outcome.kept)[:count]
    b.relay.bonus[rows] = outcome.bonus[:count]
    width = b.width
    b.scratch.kept.copy_(torch.where(live, outcome.kept, 1))
    b.extend.tokens.copy_(torch.where(live.unsqueeze(1), outcome.tokens, 0).flatten())
    b.extend.lens.copy_(torch.where(live, b.scratch.prefix + width, PAD_LENGTH))
    b.extend.correct.copy_(torch.where(live, outcome.kept - 1, width))
    b.extend.accepted.copy_(torch.where(live, outcome.kept, width))
    b.extend.widths.fill_(width)
    carry(b)


def carry(buffers: CycleBuffers) -> None:
    """Hidden states from verify to draft extend, where the two are not the same memory."""
    if not buffers.hidden_shared:
        buffers.extend.hidden.copy_(buffers.verify.hidden)


def relay(buffers: CycleBuffers) -> None:
    """Hand the last accepted row's next draft and hidden state to the next cycle."""
    b = buffers
    count = int(b.control.state[LIVE])
    rows = b.control.rows[:count]
    first = torch.arange(b.batch, device=rows.device) * b.width
    last = (first + b.scratch.kept - 1)[:count]
    b.relay.token[rows] = b.extend.logits[last].argmax(dim=-1, keepdim=True)
    b.relay.probability[rows] = 1.0
    b.relay.hidden[rows] = b.extend.states[last]
    _mark(b, 4)


def _live(buffers: CycleBuffers) -> torch.Tensor:
    index = torch.arange(buffers.batch, device=buffers.control.rows.device)
    return index < buffers.control.state[LIVE]


def _slots(buffers: CycleBuffers, count: int) -> torch.Tensor:
    """Slots of the ``count`` positions behind each prefix, int64 [B, count]; 0 for padding."""
    place = buffers.scratch.prefix.unsqueeze(1) + torch.arange(count, device=buffers.table.device)
    found = buffers.table[buffers.control.rows.unsqueeze(1), place].long()
    return torch.where(_live(buffers).unsqueeze(1), found, 0)


def _mark(buffers: CycleBuffers, boundary: int) -> None:
    """Leave the time of a boundary; a CPU has done all work before it."""
    if buffers.table.device.type == "cpu":
        slot = int(buffers.control.state[SLOT])
        buffers.results.marks[slot, boundary] = time.perf_counter_ns()
