"""The small gathers after a verify step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel_portable import fill_accept_out_cache_loc_cpu, fill_bonus_tokens_cpu, rotate_input_ids_cpu


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_bonus_token_is_the_last_accepted(bs: int, stride: int, data: st.DataObject) -> None:
    tokens = torch.arange(bs * stride, dtype=torch.int32).view(bs, stride) + 100
    lengths = [data.draw(st.integers(1, stride)) for _ in range(bs)]
    out = torch.full((bs,), -1, dtype=torch.int32)
    fill_bonus_tokens_cpu(tokens, torch.tensor(lengths, dtype=torch.int32), out, stride)
    assert out.tolist() == [100 + i * stride + length - 1 for i, length in enumerate(lengths)]


def test_an_accept_length_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 0\] outside \[1, 3\]"):
        fill_bonus_tokens_cpu(torch.zeros(6), torch.tensor([2, 0]), torch.zeros(2, dtype=torch.int32), 3)


@given(st.lists(st.integers(-1, 8), min_size=1, max_size=12), st.booleans())
def test_accepted_slots_are_packed_in_order(index: list[int], with_size: bool) -> None:
    slots = torch.arange(9, dtype=torch.int64) * 10 + 3
    out = torch.full((len(index),), -5, dtype=torch.int64)
    size = (len(index),) if with_size else ()
    fill_accept_out_cache_loc_cpu(torch.tensor(index, dtype=torch.int32), slots, out, *size)
    kept = [10 * i + 3 for i in index if i >= 0]
    assert out.tolist() == kept + [-5] * (len(index) - len(kept))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans(), st.data())
def test_rotation_shifts_each_segment(lengths: list[int], selected: bool, data: st.DataObject) -> None:
    ids = list(range(100, 100 + sum(lengths)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    new = list(range(900, 900 + len(lengths)))
    places = [
        start + (data.draw(st.integers(0, length - 1)) if length else 0)
        for start, length in zip(starts, lengths, strict=True)
    ]
    expected = list(ids)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length:
            expected[start : start + length - 1] = ids[start + 1 : start + length]
            expected[places[i] if selected else start + length - 1] = new[i]
    got = torch.tensor(ids)
    rotate_input_ids_cpu(
        got,
        torch.tensor(starts),
        torch.tensor(lengths),
        torch.tensor(new),
        torch.tensor(places) if selected else None,
    )
    assert got.tolist() == expected
