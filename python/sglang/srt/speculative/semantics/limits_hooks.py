"""Topic ``run-limits``: room for a whole run at the end of the context, and the same context as without speculation.

A verify reserves twice its width beyond the committed tokens. Upstream widens a request's row of the page
table by the width plus four, enough for widths up to six; a wider run that ends at the context limit writes
its slots into the neighbour's row. And it refuses requests that come within one width of the context limit,
which plain decoding serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def row_headroom(original: Callable[[Any], int], server_args: Any) -> int:
    """Around the page table's row headroom: never less than the largest reservation, page-aligned."""
    stock = original(server_args)
    if server_args.speculative_algorithm is None:
        return stock
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    reserve: int = get_alloc_reserve_per_decode(server_args)
    page: int = server_args.page_size
    return max(stock, reserve + page - 1)


def reserved_tokens(original: Callable[[Any], int], server_args: Any) -> int:
    """Around the tokens that a request must leave free: none.

    A verify may run past the limit by its width. The page table has the room (above), upstream lengthens the
    rotary tables of target and draft for it, and what lies behind the limit is cut from the output.
    """
    reserved = original(server_args)
    family = str(server_args.speculative_algorithm or "").upper()
    return 0 if family.startswith("EAGLE") else reserved
