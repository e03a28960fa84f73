"""Raw row copies: overlap, mixed element types, and rows that must stay as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel_portable import copy_all_layer_kv_cache_cpu
from torch import Tensor

SLOTS = 13


def buffers() -> list[Tensor]:
    """Buffers of different row widths and dtypes, the last with an odd number of bytes a row."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(SLOTS, 2, 6, generator=generator),
        torch.randn(SLOTS, 1, 5, generator=generator).to(torch.bfloat16),
        torch.randint(0, 255, (SLOTS, 7), dtype=torch.uint8, generator=generator),
    ]


@given(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS), st.data())
def test_all_sources_are_read_before_any_target_is_written(targets: list[int], data: st.DataObject) -> None:
    sources = [data.draw(st.integers(0, SLOTS - 1)) for _ in targets]
    got, before = buffers(), buffers()
    copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in got], dtype=torch.uint64),
        torch.tensor([b[0].nbytes for b in got]),
        torch.tensor(targets, dtype=torch.int64),
        torch.tensor(sources, dtype=torch.int64),
    )
    for after, old in zip(got, before, strict=True):
        for slot in range(SLOTS):
            origin = sources[targets.index(slot)] if slot in targets else slot
            assert torch.equal(after[slot], old[origin])


def test_negative_slots_and_unequal_lists_are_refused() -> None:
    buffer = torch.zeros(SLOTS, 4)
    pointers = torch.tensor([buffer.data_ptr()], dtype=torch.uint64)
    strides = torch.tensor([16])
    with pytest.raises(ValueError, match="negative slot"):
        copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([-1]), torch.tensor([0]))
    with pytest.raises(ValueError, match="1 sources with 2 targets"):
        copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([0, 1]), torch.tensor([0]))
