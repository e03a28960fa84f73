# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""One launch that keeps the rows of a plain step."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def store_rows(hidden, tokens, slots, positions, ring, ring_tokens, stride, width, span, BLOCK: tl.constexpr):
    """Program (b, part): columns of row b go to ``ring[slots[b], positions[b] % span]``."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    place = slot * span + tl.load(positions + row).to(tl.int64) % span
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(hidden + row.to(tl.int64) * stride + columns, mask=inside)
    tl.store(ring + place * width + columns, values, mask=inside)
    if part == 0:
        tl.store(ring_tokens + place, tl.load(tokens + row).to(tl.int64))
