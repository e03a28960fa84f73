"""Paged allocation against a page-by-page model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.cpu_engine.paged_slots import alloc_decode, alloc_extend, paged_slots

requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)


@given(requests, st.integers(1, 17), st.integers(0, 30), st.data())
def test_slots_fill_the_last_page_and_then_fresh_ones(
    lengths: list[tuple[int, int]], page_size: int, pages: int, data: st.DataObject
) -> None:
    free = data.draw(st.permutations(range(100, 100 + pages)))
    supply = iter(free)
    slots: list[int] = []
    last = []
    enough = True
    for i, (prefix, extra) in enumerate(lengths):
        # The last page of each request is page 1000 + i; a full or missing one must not be used.
        page = 1000 + i
        last.append(page * page_size + (prefix - 1) % page_size if prefix else -1)
        for position in range(prefix, prefix + extra):
            if position % page_size == 0:
                page = next(supply, -1)
                enough = enough and page >= 0
            slots.append(page * page_size + position % page_size)
    got = paged_slots(
        torch.tensor([prefix for prefix, _ in lengths]),
        torch.tensor([prefix + extra for prefix, extra in lengths], dtype=torch.int32),
        torch.tensor(last),
        torch.tensor(free, dtype=torch.int64),
        page_size,
    )
    if not enough:
        assert got is None
        return
    assert got is not None
    assert got[0].tolist() == slots
    assert got[0].dtype == torch.int64
    assert got[1] == pages - len(list(supply))


class Allocator(SimpleNamespace):
    """Upstream's allocator as far as the hooks look at it."""

    def merge_and_sort_free(self) -> None:
        self.free_pages = torch.cat([self.free_pages, self.release_pages]).sort().values
        self.release_pages = torch.empty(0, dtype=torch.int64)


def never(*_: Any) -> None:
    raise AssertionError("the stock path was taken on the CPU")


def test_extend_then_decode_take_pages_from_the_front() -> None:
    allocator = Allocator(
        device="cpu",
        page_size=4,
        need_sort=True,
        free_pages=torch.tensor([7]),
        release_pages=torch.tensor([2, 5]),
    )
    zero, six = torch.tensor([0]), torch.tensor([6])
    assert alloc_extend(never, allocator, zero, zero, six, six, torch.tensor([-1]), 6).tolist() == [8, 9, 10, 11, 20, 21]  # fmt: skip
    assert allocator.free_pages.tolist() == [7]
    assert alloc_decode(never, allocator, six + 1, six + 1, torch.tensor([21])).tolist() == [22]
    assert alloc_decode(never, allocator, six + 3, six + 3, torch.tensor([23])).tolist() == [28]
    assert alloc_decode(never, allocator, six + 7, six + 7, torch.tensor([31])) is None


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_other_devices_keep_the_stock_path(device: str) -> None:
    allocator = Allocator(device=device)
    assert alloc_decode(lambda *given: given[0] is allocator, allocator, None, None, None)
    assert alloc_extend(lambda *given: len(given) == 8, allocator, *[None] * 6)
