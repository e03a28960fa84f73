"""The reserve of slots before plain steps: upstream's for most of them is left out, and nothing runs short of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.speculative.auto import plain
from sglang.srt.speculative.auto.reserve import AHEAD, SHARE, has_room, prepare

RESERVE = 6


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: RESERVE)


class Upstream:
    """Upstream's reserve as far as it counts: every request gets what the next verify may need."""

    def __init__(self, fails: bool = False) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, batch: Any) -> None:
        self.calls += 1
        if self.fails:
            raise RuntimeError("no slots")
        page = batch.token_to_kv_pool_allocator.page_size
        for request in batch.reqs:
            wanted = -(-(request.kv_committed_len + RESERVE) // page) * page
            request.kv.kv_allocated_len = max(request.kv.kv_allocated_len, wanted)
            request.decode_batch_idx += 1


def batch_of(*committed: int, page: int = 1, free: int = 1 << 20, row: int = 4096, mark: bool = True) -> Any:
    """A batch whose requests have committed so many tokens, and no slot beyond."""
    info = SimpleNamespace()
    if mark:
        setattr(info, plain.MARK, True)
    return SimpleNamespace(
        spec_info=info,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page, available_size=lambda: free // 2),
        tree_cache=SimpleNamespace(evictable_size=lambda: free - free // 2),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(2, row, device="meta")),
        reqs=[
            SimpleNamespace(
                kv_committed_len=length, decode_batch_idx=0, kv=SimpleNamespace(kv_allocated_len=length)
            )
            for length in committed
        ],
    )


def steps(batch: Any, upstream: Upstream, count: int) -> None:
    """Plain steps: one token each; what upstream would have reserved is always there."""
    page = batch.token_to_kv_pool_allocator.page_size
    for _ in range(count):
        before = [request.kv_committed_len for request in batch.reqs]
        prepare(upstream, batch)
        assert [request.kv_committed_len for request in batch.reqs] == before
        for request in batch.reqs:
            wanted = -(-(request.kv_committed_len + RESERVE) // page) * page
            assert wanted <= request.kv.kv_allocated_len <= batch.req_to_token_pool.req_to_token.shape[1]
            request.kv_committed_len += 1


@pytest.mark.parametrize("page", [1, 16, 64])
def test_most_plain_steps_reserve_nothing(page: int) -> None:
    upstream, batch = Upstream(), batch_of(100, 37, page=page)
    steps(batch, upstream, 10 * AHEAD)
    assert upstream.calls <= 11
    assert [request.decode_batch_idx for request in batch.reqs] == [10 * AHEAD] * 2


def test_a_request_that_joins_gets_its_slots() -> None:
    upstream, batch = Upstream(), batch_of(100)
    steps(batch, upstream, 5)
    batch.reqs += batch_of(50).reqs
    steps(batch, upstream, 5)
    assert upstream.calls == 2


@pytest.mark.parametrize(
    "changes", [{"free": SHARE * (AHEAD + RESERVE)}, {"row": 100 + AHEAD + RESERVE}], ids=["pool", "row"]
)
def test_where_room_is_short_upstream_reserves_in_every_step(changes: dict[str, int]) -> None:
    upstream, batch = Upstream(), batch_of(100, **changes)
    assert not has_room(batch, RESERVE, 1)
    steps(batch, upstream, 20)
    assert upstream.calls == 20


def test_what_is_not_plain_is_upstreams() -> None:
    """Cycles, and a batch with penalties, which upstream adds up there."""
    penalized = batch_of(100)
    penalized.sampling_info.penalizer_orchestrator.is_required = True
    for batch in (batch_of(100, mark=False), penalized):
        upstream = Upstream()
        for _ in range(5):
            prepare(upstream, batch)
        assert upstream.calls == 5
        assert batch.reqs[0].kv.kv_allocated_len == 100 + RESERVE


def test_a_reserve_that_fails_leaves_the_lengths_as_they_were() -> None:
    batch = batch_of(100)
    with pytest.raises(RuntimeError):
        prepare(Upstream(fails=True), batch)
    assert batch.reqs[0].kv_committed_len == 100
