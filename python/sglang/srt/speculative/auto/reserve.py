"""KV slots of plain steps are reserved for many steps at once.

Upstream reserves before every step what a verify may need: two small tensors, their copies to the device and a launch,
all on the host between the end of one step and the launch of the next. A verify keeps several tokens, so that is due
each time; after a plain step it is one slot a request. Reserved ahead, most plain steps find their slots there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.auto.plain import MARK

# Steps that one reserve lasts, and the largest share of the free slots that may go into it.
AHEAD = 32
SHARE = 16


def prepare(original: Callable[[Any], None], batch: Any) -> None:
    """Around the reserve before a decode: nothing where a plain step finds all slots, more than one step's else.

    What is free for the next verify stays what upstream asks for: whoever decodes next is not known here.
    """
    info = batch.sampling_info
    if not getattr(batch.spec_info, MARK, False) or info.penalizer_orchestrator.is_required:
        original(batch)
        return
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    requests = batch.reqs
    reserve, page = get_alloc_reserve_per_decode(), batch.token_to_kv_pool_allocator.page_size
    for request in requests:
        if request.kv.kv_allocated_len < -(-(request.kv_committed_len + reserve) // page) * page:
            break
    else:
        for request in requests:
            request.decode_batch_idx += 1
        return
    if not has_room(batch, reserve, page):
        original(batch)
        return
    # Upstream measures from the committed length; nothing else reads it meanwhile.
    for request in requests:
        request.kv_committed_len += AHEAD
    try:
        original(batch)
    finally:
        for request in requests:
            request.kv_committed_len -= AHEAD


def has_room(batch: Any, reserve: int, page: int) -> bool:
    """Whether slots for ``AHEAD`` more steps fit into each request's row, and are a small share of what is free.

    Near the end of the pool upstream's own accounting decides, which knows of one step.
    """
    longest = max(request.kv_committed_len for request in batch.reqs) + AHEAD + reserve + page
    if longest > batch.req_to_token_pool.req_to_token.shape[1]:
        return False
    free: int = batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()
    return SHARE * len(batch.reqs) * (AHEAD + reserve + page) <= free
