"""The kernels under Triton's interpreter, in float32 and float16 (it computes bfloat16 wrongly).

Not collected by itself: ``test_interpreted.py`` runs it in a process of its own, because whether a kernel is
interpreted is decided when its module is imported.
"""

from __future__ import annotations

from dataclasses import replace

import checks
import pytest
import torch
import triton
import triton.language as tl
from cases import SMALL
from paged import Batch, Case, error
from sglang.srt.layers.attention.verify import launch
from sglang.srt.layers.attention.verify.schedule import locate_request, locate_work

CHAIN = Case("chain", lengths=(37, 70))
GQA = Case("gqa-chain", kind="gqa", heads=4, kv_heads=2, dim=64, lengths=(37, 70))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_oracle(case: Case) -> None:
    checks.matches_oracle(case, "cpu")


@pytest.mark.parametrize("case", [CHAIN, GQA], ids=lambda c: c.name)
def test_later_tokens_do_not_leak(case: Case) -> None:
    checks.later_tokens_do_not_leak(case, "cpu")


@pytest.mark.parametrize("case", [CHAIN, GQA], ids=lambda c: c.name)
def test_verify_row_equals_decode(case: Case) -> None:
    checks.verify_equals_decode(case, "cpu")


def test_padding_reads_nothing() -> None:
    checks.padding_is_silent(Case("padding", lengths=(0, 37, 0, 5)), "cpu")


def test_every_split_count_repeats_bitwise() -> None:
    checks.repeats_are_equal(Case("b7", tokens=1, lengths=(131,)), "cpu", (1, 2, 4, 8, 16), repeats=1)


def test_one_split_dominates() -> None:
    checks.one_split_dominates(Case("b13", lengths=(131,)), "cpu")


def test_lengths_change_by_100x_between_calls() -> None:
    checks.lengths_may_change(Case("replay", tokens=1), "cpu", ((300, 1), (3, 300), (1, 0), (297, 299)))


@triton.jit
def _list_work(
    out,
    requests_out,
    seq_lens,
    requests,
    batch,
    target,
    ITEMS: tl.constexpr,
    LANES: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    work = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    b, pool, first, count, length, chunk = locate_work(
        lanes, work, seq_lens, requests, batch, target, LANES, 3, False, True, 16, MIN_KEYS
    )
    tl.store(out + work * 6 + 0, b)
    tl.store(out + work * 6 + 1, pool)
    tl.store(out + work * 6 + 2, first)
    tl.store(out + work * 6 + 3, count)
    tl.store(out + work * 6 + 4, length)
    tl.store(out + work * 6 + 5, chunk)
    if work < batch:
        first, count = locate_request(
            lanes, work, seq_lens, requests, batch, target, LANES, 3, False, True, 16, MIN_KEYS
        )
        tl.store(requests_out + work * 2, first)
        tl.store(requests_out + work * 2 + 1, count)


@pytest.mark.parametrize("seed", range(12))
def test_work_list_covers_every_key_once(seed: int) -> None:
    """Items partition the keys of every live request, stay within the plan's bound, and both stages agree."""
    gen = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 9, (1,), generator=gen))
    scale = 10 ** int(torch.randint(1, 5, (1,), generator=gen))
    lens = torch.randint(0, scale, (batch,), generator=gen)
    pools = torch.randperm(batch, generator=gen)
    if batch > 2:
        pools[1] = -1
    target = int(torch.randint(1, 40, (1,), generator=gen))
    items = target + batch - 1
    found = torch.zeros(items + 3, 6, dtype=torch.int32)
    found_requests = torch.zeros(items + 3, 2, dtype=torch.int32)
    _list_work[(items + 3,)](
        found, found_requests, lens, pools, batch, target, items, triton.next_power_of_2(batch), 32
    )
    covered = {b: 0 for b in range(batch)}
    for work, (b, pool, first, count, length, chunk) in enumerate(found.tolist()):
        lo = (work - first) * chunk
        if lo >= length:
            continue
        assert work < items and 0 <= work - first < count
        assert pool == int(pools[b])
        assert lo == covered[b], "chunks of a request follow each other"
        covered[b] = min(length, lo + chunk)
        assert found_requests[b].tolist() == [first, count]
    for b in range(batch):
        assert covered[b] == (0 if pools[b] < 0 else int(lens[b]) + 3)


# Controls: each switches one safeguard off and demands that the checks above notice.


def test_control_length_one_too_long_meets_poison() -> None:
    batch = Batch(Case("control", page=16, lengths=(37,)))
    tail = int(batch.slots[0][0]) // 16 * 0 + int(batch.table[batch.req[0], 36]) + 1
    batch.table[batch.req[0], 37] = tail
    batch.seq_lens += 1
    out, _ = batch.run()
    assert error(out, batch.expected()[0]) == float("inf")


def test_control_wrong_length_convention_is_seen() -> None:
    case = Case("control", lengths=(37,))
    batch = Batch(case)
    context = replace(batch.context(), lens_include_new=True)
    batch.context = lambda: context  # type: ignore[method-assign]
    out, _ = batch.run()
    assert error(out, batch.expected()[0]) > 1e-2


def test_control_merge_switched_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def run(self, *args: object) -> None:
            return None

    monkeypatch.setattr(launch, "merge_launch", lambda plan, form: Silent())
    checks.must_fail(lambda: checks.matches_oracle(CHAIN, "cpu"))


def test_control_equal_weights_in_the_merge_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.merge_launch

    class Flat:
        def __init__(self, inner: launch.Launch) -> None:
            self.inner = inner

        def run(self, partial: torch.Tensor, partial_lse: torch.Tensor, *args: object) -> None:
            self.inner.run(partial, torch.zeros_like(partial_lse), *args)

    monkeypatch.setattr(launch, "merge_launch", lambda plan, form: Flat(real(plan, form)))
    checks.must_fail(lambda: checks.one_split_dominates(Case("control", lengths=(131,)), "cpu"))
