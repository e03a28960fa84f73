"""Test-only plugin: the draft's KV pool starts as NaN, so that a row nobody wrote cannot be read unnoticed."""

from __future__ import annotations

import sys
from typing import Any

ENTRY = "poisoned_draft_kv"
MARK = "the draft's KV pool is poisoned"


def activate() -> None:
    """Entry point: around the draft worker's pool allocation."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.alloc_memory_pool", poison, HookType.AROUND
    )
    print(MARK, file=sys.stderr, flush=True)


def poison(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Fill the pool with NaN, but for slot 0, which padding writes to."""
    done = original(worker, *args, **kwargs)
    pool = worker.draft_runner.token_to_kv_pool
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for buffer in getattr(pool, name, None) or []:
            buffer[1:].fill_(float("nan"))
    return done
