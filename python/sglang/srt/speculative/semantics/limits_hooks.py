"""Topic ``run-limits``: room for a whole run at the end of the context, and the same context as without speculation.

A verify reserves twice its width beyond the committed tokens. Upstream widens a request's row of the page
table by the width plus four, enough for widths up to six; a wider run that ends at the context limit writes
its slots into the neighbour's row. And it refuses requests that come within one width of the context limit,
which plain decoding serves. Nor does it look at the token ids that a request gives: one outside the vocabulary
is an index error in the scheduler on a CPU, a device assertion on a GPU, and the end of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.semantics.request_fields import fault, sampling_fault


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


def known_tokens(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: list[int] | None, *rest: Any
) -> None:
    """Around the checks of one request: refuse ids that the embedding has no row for.

    Requests with images or sound are left to upstream, which puts placeholders into their ids.

    Raises:
        ValueError: an id below 0 or not below the vocabulary, or a value of a kind that the scheduler cannot do with;
            upstream answers it with status 400.
    """
    parameters = getattr(obj, "sampling_params", None)
    size = int(manager.model_config.vocab_size)
    told = fault(obj, size) or (sampling_fault(parameters) if isinstance(parameters, dict) else None)
    if told is not None:
        raise ValueError(told)
    original(manager, obj, input_ids, *rest)
    if input_ids is None or obj.contains_mm_input():
        return
    if not input_ids:
        if getattr(obj, "session_params", None):
            return  # A turn of a session may add nothing to what was said.
        # Upstream refuses this only where no text stands beside it.
        raise ValueError("input_ids = [] holds no token; give at least one, or a text in its place")
    if min(input_ids) < 0 or max(input_ids) >= size:
        place, value = next((i, one) for i, one in enumerate(input_ids) if not 0 <= one < size)
        raise ValueError(
            f"input_ids[{place}] = {value} is no token of this model, whose ids are 0 to {size - 1}; "
            "tokenize with this model's tokenizer"
        )
