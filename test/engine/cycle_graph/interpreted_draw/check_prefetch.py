"""Chunks of the prefetch under Triton's interpreter, by the function that the kernel computes them with."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from sglang.srt.speculative.cycle_graph.prefetch.kernel import CHUNK, LANES, UNIT, chunk_of, programs


@triton.jit
def _chunks(out, total, CHUNK: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, LANES)
    start, size = chunk_of(tl.program_id(0), lanes, total, CHUNK, LANES)
    at = (tl.program_id(0) * LANES + lanes) * 2
    tl.store(out + at, start)
    tl.store(out + at + 1, size)


def chunks(total: int, grid: int) -> list[tuple[int, int]]:
    out = torch.full((grid * LANES, 2), -1, dtype=torch.int32)
    _chunks[(grid,)](out, total, CHUNK=CHUNK, LANES=LANES)
    return [(start, size) for start, size in out.tolist() if size > 0]


SIZES = (
    UNIT,
    CHUNK - UNIT,
    CHUNK,
    CHUNK + UNIT,
    3 * CHUNK + 112,
    CHUNK * LANES,
    CHUNK * LANES + UNIT,
    5_000_016,
)


@pytest.mark.parametrize("total", SIZES)
def test_chunks_cover_the_range_once_and_nothing_else(total: int) -> None:
    end = 0
    for start, size in chunks(total, programs(total)):
        assert start == end and 0 < size <= CHUNK and size % UNIT == 0
        end += size
    assert end == total


def test_programs_too_many_ask_for_nothing() -> None:
    assert chunks(UNIT, 3) == [(0, UNIT)]


def test_control_programs_too_few_leave_a_rest() -> None:
    assert sum(size for _, size in chunks(5_000_016, programs(5_000_016) - 1)) < 5_000_016
