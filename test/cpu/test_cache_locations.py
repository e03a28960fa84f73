"""The slot-table ops against a dictionary of cells, with poison in every cell that must not be touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel_portable import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
)
from torch import Tensor

ROWS, COLUMNS = 7, 23
POISON = -12345
index_dtype = st.sampled_from([torch.int32, torch.int64])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Distinct table rows with a range of columns each, empty ranges included."""
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=0, max_size=ROWS, unique=True))
    starts = [draw(st.integers(0, COLUMNS)) for _ in rows]
    return rows, starts, [draw(st.integers(start, COLUMNS)) for start in starts]


def table() -> Tensor:
    return (torch.arange(ROWS * COLUMNS, dtype=torch.int32) * 17 + 1000).view(ROWS, COLUMNS)


@given(ranges(), index_dtype)
def test_assign_writes_these_cells_and_no_other(
    case: tuple[list[int], list[int], list[int]], dtype: torch.dtype
) -> None:
    rows, starts, ends = case
    total = sum(end - start for start, end in zip(starts, ends, strict=True))
    slots = torch.arange(total + 3, dtype=torch.int64) + 50_000
    expected = {(r, c): int(table()[r, c]) for r in range(ROWS) for c in range(COLUMNS)}
    supply = iter(slots.tolist())
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(start, end):
            expected[row, column] = next(supply)
    got = table()
    assign_req_to_token_pool_cpu(
        torch.tensor(rows, dtype=dtype),
        got,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        slots,
        COLUMNS,
    )
    assert {(r, c): int(got[r, c]) for r in range(ROWS) for c in range(COLUMNS)} == expected


@given(ranges(), index_dtype, st.integers(0, 5))
def test_extend_reads_packed_and_leaves_the_tail(
    case: tuple[list[int], list[int], list[int]], dtype: torch.dtype, spare: int
) -> None:
    rows, starts, ends = case
    packed = [
        int(table()[row, column])
        for row, start, end in zip(rows, starts, ends, strict=True)
        for column in range(start, end)
    ]
    out = torch.full((len(packed) + spare,), POISON, dtype=torch.int64)
    assign_extend_cache_locs_cpu(
        torch.tensor(rows, dtype=torch.int64),
        table(),
        torch.tensor(starts, dtype=dtype),
        torch.tensor(ends, dtype=dtype),
        out,
        COLUMNS,
    )
    assert out.tolist() == packed + [POISON] * spare


@given(
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.data(),
)
def test_draft_slots_and_branch_table(rows: list[int], topk: int, steps: int, data: st.DataObject) -> None:
    seq_lens = [data.draw(st.integers(0, COLUMNS - topk * steps)) for _ in rows]
    out = torch.full((len(rows) * topk * steps,), POISON, dtype=torch.int64)
    index, lengths = torch.tensor(rows), torch.tensor(seq_lens)
    assign_draft_cache_locs_contiguous_cpu(index, table(), lengths, out, COLUMNS, topk, steps)
    flat = [
        int(table()[row, seq_len + i])
        for row, seq_len in zip(rows, seq_lens, strict=True)
        for i in range(topk * steps)
    ]
    assert out.tolist() == flat
    branches = build_draft_decode_metadata_cpu(table(), index, lengths, topk, steps, COLUMNS)
    for i, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        for t in range(topk):
            wanted = table()[row, :seq_len].tolist()
            wanted += table()[row, seq_len + t * steps : seq_len + (t + 1) * steps].tolist()
            assert branches[i * topk + t, : seq_len + steps].tolist() == wanted


def test_a_range_beyond_the_row_is_refused_with_its_numbers() -> None:
    one = torch.tensor([0])
    with pytest.raises(IndexError, match=r"end=\[24\].*23 columns"):
        assign_extend_cache_locs_cpu(
            one, table(), torch.tensor([20]), torch.tensor([24]), torch.empty(4, dtype=torch.int64), COLUMNS
        )
    with pytest.raises(ValueError, match="24 columns"):
        assign_extend_cache_locs_cpu(one, table(), one, one, torch.empty(0, dtype=torch.int64), COLUMNS + 1)
    with pytest.raises(ValueError, match="4 slots are needed, out_cache_loc holds 3"):
        assign_req_to_token_pool_cpu(
            one, table(), one, torch.tensor([4]), torch.zeros(3, dtype=torch.int64), COLUMNS
        )
    with pytest.raises(IndexError, match=r"needs 20 \+ 2 \* 2"):
        build_draft_decode_metadata_cpu(table(), one, torch.tensor([20]), 2, 2, COLUMNS)
