"""Slots of paged KV pools, without the Triton kernels that upstream fills them with.

A page holds `page_size` slots in a row. New tokens first fill the request's last page, then whole free pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["alloc_decode", "alloc_extend", "paged_slots"]


def paged_slots(
    prefix_lens: Tensor, seq_lens: Tensor, last_slots: Tensor, free_pages: Tensor, page_size: int
) -> tuple[Tensor, int] | None:
    """Return the slots of tokens [prefix, sequence length) of each request, and how many pages they took.

    Args:
        prefix_lens, seq_lens: tokens of each request before and after, [bs].
        last_slots: slot of each request's last token; ignored where its last page is full or it has none, [bs].
        free_pages: page numbers, taken from the front, request after request.
        page_size: slots a page.

    Returns:
        int64 slots, packed by request, and the pages taken; None if there are not enough pages.
    """
    prefix, end = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
    held = (prefix + page_size - 1) // page_size
    wanted = (end + page_size - 1) // page_size - held
    total = int(wanted.sum())
    if total > free_pages.numel():
        return None
    length = end - prefix
    request = torch.repeat_interleave(torch.arange(prefix.numel()), length)
    step = torch.arange(request.numel()) - (torch.cumsum(length, 0) - length)[request]
    position = prefix[request] + step
    page = position // page_size - held[request]
    first_page = torch.cumsum(wanted, 0) - wanted
    in_last = last_slots.to(torch.int64)[request] + 1 + step
    if total == 0:
        return in_last, 0
    fresh = free_pages[(first_page[request] + page).clamp(min=0, max=total - 1)].to(torch.int64)
    return torch.where(page < 0, in_last, fresh * page_size + position % page_size), total


def _take(allocator: Any, prefix_lens: Tensor, seq_lens: Tensor, last_slots: Tensor) -> Tensor | None:
    size = allocator.page_size
    taken = paged_slots(prefix_lens, seq_lens, last_slots, allocator.free_pages, size)
    if taken is None and allocator.need_sort:
        allocator.merge_and_sort_free()
        taken = paged_slots(prefix_lens, seq_lens, last_slots, allocator.free_pages, size)
    if taken is None:
        return None
    slots, pages = taken
    allocator.free_pages = allocator.free_pages[pages:]
    return slots


def alloc_extend(
    original: Callable[..., Any],
    allocator: Any,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """Around `PagedTokenToKVPoolAllocator.alloc_extend`: slots for tokens behind each prefix, or None."""
    if not str(allocator.device).startswith("cpu"):
        return original(  # type: ignore[no-any-return]
            allocator,
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages,
        )
    return _take(allocator, prefix_lens, seq_lens, last_loc)


def alloc_decode(
    original: Callable[..., Any], allocator: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
) -> Tensor | None:
    """Around `PagedTokenToKVPoolAllocator.alloc_decode`: one slot a request, whose length includes it."""
    if not str(allocator.device).startswith("cpu"):
        return original(allocator, seq_lens, seq_lens_cpu, last_loc)  # type: ignore[no-any-return]
    return _take(allocator, seq_lens - 1, seq_lens, last_loc)
