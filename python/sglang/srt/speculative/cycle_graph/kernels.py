"""The glue between the passes as Triton kernels: six small launches inside the graph, one (``load``) before it.

Each equals its namesake in ``steps``; the device code is in ``device``. Padded requests touch neither the relay nor the
results, and read row 0 only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from sglang.srt.speculative.cycle_graph import device, draw_kernel, steps
from sglang.srt.speculative.cycle_graph.buffers import COUNTER, CycleBuffers

# Columns that one program reduces or copies.
COLUMNS = 4096


def parts(columns: int) -> int:
    """Programs that share one row of ``columns``."""
    return -(-columns // COLUMNS)


def _lanes(count: int) -> int:
    lanes: int = triton.next_power_of_2(max(2, count))
    return lanes


def _timed(buffers: CycleBuffers) -> bool:
    return buffers.table.is_cuda


def load(buffers: CycleBuffers, rows: torch.Tensor, slot: int, simulated: int, counter: int = 0) -> None:
    """See ``steps.load``; one launch."""
    control = buffers.control
    device.load_kernel[(1,)](
        rows, rows.shape[0], slot, simulated, counter, control.state, control.rows, buffers.batch,
        BLOCK=max(4, _lanes(buffers.batch)), num_warps=1,
    )  # fmt: skip


def load_sampling(buffers: CycleBuffers, info: Any) -> None:
    """See ``steps.load_sampling``; one launch."""
    mine = buffers.sampling
    assert mine is not None
    device.load_sampling_kernel[(1,)](
        info.top_ks.shape[0], info.temperatures, info.top_ks, info.top_ps, info.min_ps,
        mine.temperatures, mine.top_ks, mine.top_ps, mine.min_ps, buffers.batch,
        BLOCK=_lanes(buffers.batch), num_warps=1,
    )  # fmt: skip


def begin(buffers: CycleBuffers) -> None:
    """See ``steps.begin``."""
    b, hidden = buffers, buffers.draft.hidden.shape[1]
    device.begin_kernel[(b.batch, parts(hidden))](
        b.control.state, b.control.rows, b.table, b.table.stride(0),
        b.relay.lengths, b.relay.bonus, b.relay.token, b.relay.hidden,
        b.scratch.prefix, b.scratch.bonus, b.draft.rows, b.verify.rows, b.extend.rows,
        b.draft.lens, b.draft.positions, b.draft.slots, b.draft.token, b.draft.probability, b.draft.hidden,
        hidden, b.results.marks,
        STEPS=b.steps, LANES=_lanes(b.steps), PAD=1, TIMED=_timed(b), COLS=COLUMNS,
    )  # fmt: skip


def verify_inputs(buffers: CycleBuffers) -> None:
    """See ``steps.verify_inputs``."""
    b = buffers
    device.verify_inputs_kernel[(b.batch,)](
        b.control.state, b.control.rows, b.table, b.table.stride(0), b.scratch.prefix, b.scratch.bonus,
        b.draft.proposed, b.verify.tokens, b.verify.lens, b.verify.positions, b.verify.slots,
        b.extend.positions, b.extend.slots, b.results.marks,
        WIDTH=b.width, LANES=_lanes(b.width), TIMED=_timed(b), num_warps=1,
    )  # fmt: skip


def accept(buffers: CycleBuffers) -> None:
    """See ``steps.accept``; two launches, the first of which also carries the hidden states over.

    Where rows are drawn, a mark, those of the draw, a copy and acceptance.
    """
    b, vocabulary, width = buffers, buffers.verify.logits.shape[1], buffers.verify.hidden.shape[1]
    if b.sampling is None:
        shared = parts(vocabulary)
        copied = 0 if b.hidden_shared else parts(width)
        device.maxima_kernel[(b.batch * b.width, shared + copied)](
            b.control.state, b.verify.logits, b.verify.logits.stride(0), vocabulary,
            b.scratch.maxima, b.scratch.indices, b.verify.hidden, b.extend.hidden, width, b.results.marks,
            PARTS=shared, TIMED=_timed(b), COLS=COLUMNS, num_warps=8,
        )  # fmt: skip
    else:
        shared = 1
        device.mark_kernel[(1,)](b.control.state, b.results.marks, BOUNDARY=2, TIMED=_timed(b), num_warps=1)
        draw_kernel.draw(
            b.control.state, COUNTER, b.verify.logits, b.sampling, b.scratch.maxima, b.scratch.indices
        )
        steps.carry(b)
    device.accept_kernel[(b.batch,)](
        b.control.state, b.control.rows, b.scratch.maxima, b.scratch.indices, b.scratch.maxima.stride(0),
        b.verify.tokens, b.scratch.prefix, b.scratch.kept, b.relay.lengths, b.relay.bonus,
        b.extend.tokens, b.extend.lens, b.extend.correct, b.extend.accepted, b.extend.widths,
        b.results.tokens, b.results.lengths, b.results.good, b.results.marks, b.batch,
        WIDTH=b.width, LANES=_lanes(b.width), PARTS=shared, PART_LANES=_lanes(shared), PAD=1,
        REAL_TOKENS=b.real_tokens, TIMED=_timed(b), num_warps=1,
    )  # fmt: skip


def relay(buffers: CycleBuffers) -> None:
    """See ``steps.relay``; two launches."""
    b, vocabulary, hidden = buffers, buffers.extend.logits.shape[1], buffers.draft.hidden.shape[1]
    shared = parts(vocabulary)
    device.draft_maxima_kernel[(b.batch, shared)](
        b.scratch.kept, b.extend.logits, b.extend.logits.stride(0), vocabulary,
        b.scratch.draft_maxima, b.scratch.draft_indices, WIDTH=b.width, PARTS=shared, COLS=COLUMNS, num_warps=8,
    )  # fmt: skip
    device.relay_kernel[(b.batch, parts(hidden))](
        b.control.state, b.control.rows, b.scratch.kept, b.scratch.draft_maxima, b.scratch.draft_indices,
        b.extend.states, b.relay.token, b.relay.probability, b.relay.hidden, hidden, b.results.marks,
        WIDTH=b.width, PARTS=shared, PART_LANES=_lanes(shared), TIMED=_timed(b), COLS=COLUMNS,
    )  # fmt: skip
