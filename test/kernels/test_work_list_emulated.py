"""Kernels that read the work list of a forward pass, on the emulated device: against blocks that find their work themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import checks
import emulation
import paged
import pytest
import torch
from checks import cut
from emulation import EmulatedWarpgroup, library
from paged import Batch, Case, error
from sglang.srt.layers.attention.verify import fused_build, fused_driver, work_list
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan
from sglang.srt.layers.attention.verify.work_list import PassList

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a C++ compiler")
BF16 = torch.bfloat16
TRAITS = DeviceTraits((9, 0), 8, warpgroup="always")


class Owner:
    """Stands for a batch object of a forward pass."""


class Device:
    """Takes the launches of the product; ``old`` and ``new`` are what a control writes differently."""

    old = new = ""

    def __init__(self) -> None:
        self.kernels: dict[WarpgroupVariant, EmulatedWarpgroup] = {}

    def load(self, variant: WarpgroupVariant, device: torch.device) -> EmulatedWarpgroup:
        """What ``fused_driver.load`` would return."""
        if variant not in self.kernels:
            self.kernels[variant] = EmulatedWarpgroup(variant, self.old, self.new)
        return self.kernels[variant]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(paged, "device_traits", lambda: TRAITS)
    monkeypatch.setattr(fused_driver, "load", found.load)
    monkeypatch.setattr(fused_driver, "capture_of", lambda stream: 0)
    # What nobody has written is work for nobody, so that a control ends with a wrong result and not with wild addresses.
    monkeypatch.setattr(
        work_list,
        "allocate",
        lambda items, device: torch.full((items, fused_build.WARPGROUP_LINE), -1, dtype=torch.int32),
    )
    return found


CASES = (
    *paged.COMMON,
    Case("ring-wraps", dtype=BF16, lengths=(2063,)),
    Case("5-heads-fp16", dtype=torch.float16, heads=5, tokens=1, lengths=(130,)),
    Case("all-padding", dtype=BF16, tokens=1, heads=2, lengths=(0, 0)),
)


@pytest.fixture
def calls_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call of a ``Batch`` is a forward pass of its own."""
    monkeypatch.setattr(Batch, "work", property(lambda self: PassList()))
    yield


def layers(batch: Batch, plan: SplitPlan, count: int, lists: PassList | None) -> list[torch.Tensor]:
    """Outputs of a forward pass of ``count`` layers, each with a cache and queries of its own, in one workspace."""
    outs = []
    context = batch.context()
    batch.context = lambda: context  # type: ignore[method-assign]
    space, owner = batch.workspace(plan), Owner()
    for layer in range(count):
        torch.manual_seed(layer)
        where = torch.cat(batch.slots)
        batch.k_pool[where] = torch.randn(len(where), 1, batch.dim_k).to(batch.k_pool.dtype)
        batch.q = torch.randn(batch.q.shape).to(batch.q.dtype)
        if lists is not None:
            lists.enter(layer, owner)
        batch.work = lists
        outs.append(batch.run(plan, space)[0])
    return outs


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layers_with_one_list_give_the_same_bits_as_without(case: Case, device: Device) -> None:
    batch = Batch(case)
    plan = batch.plan()
    want = layers(batch, plan, 2, None)
    lists = PassList()
    assert all(torch.equal(a, b) for a, b in zip(layers(batch, plan, 2, lists), want, strict=True))
    assert lists.written == 1
    assert [k.lists for v, k in device.kernels.items() if v.listed] == [1]
    if any(case.lengths):
        checks.accurate(batch)


def test_slots_behind_those_of_the_list_are_the_next_ones() -> None:
    """A block with more keys than the list has slots for, several times over."""
    batch = Batch(Case("long-run", dtype=BF16, heads=2, lengths=(545,)))
    batch.work = PassList()
    checks.accurate(batch, cut(batch.plan(), 1))


@pytest.mark.parametrize("fails", ["lay_out", "launch"])
def test_a_list_that_was_not_written_or_waited_for_is_read_by_nobody(
    fails: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that fails in a layer, and a caller that goes on with the next one."""
    made, allocate = [], work_list.allocate

    def kept(*args: Any) -> torch.Tensor:
        # A list that no split has waited for lands late here; on a device its memory is used again behind it.
        made.append(allocate(*args))
        return made[-1]

    monkeypatch.setattr(work_list, "allocate", kept)
    batch = Batch(Case("fails", dtype=BF16, lengths=(3, 97)))
    plan, lists, owner = batch.plan(), PassList(), Owner()
    want = layers(batch, plan, 1, None)
    space = batch.workspace(plan)
    lists.enter(0, owner)
    batch.work = lists
    with monkeypatch.context() as patch:

        def refused(*args: Any) -> None:
            raise RuntimeError("refused")

        patch.setattr(EmulatedWarpgroup, fails, refused)
        with pytest.raises(RuntimeError, match="refused"):
            batch.run(plan, space)
    lists.enter(1, owner)
    assert torch.equal(batch.run(plan, space)[0], want[0])
    assert lists.written == 2
    # Without a layer's number in between: a bench, a kernel of one's own.
    lists = batch.work = PassList()
    with monkeypatch.context() as patch:
        patch.setattr(EmulatedWarpgroup, fails, refused)
        with pytest.raises(RuntimeError, match="refused"):
            batch.run(plan, space)
    # This run is also the last thing that the emulator owes: it would land in the next test, where nothing keeps the list.
    assert torch.equal(batch.run(plan, space)[0], want[0])
    assert lists.written == 2


@pytest.mark.parametrize("contract", checks.CONTRACTS)
def test_contracts(contract: str, calls_alone: None) -> None:
    checks.CONTRACTS[contract]()


# Requests with very many, many, some, few blocks and one, and none: every way to share the work of a merge.
SKEWED = Case(
    "skewed", dtype=BF16, heads=10, tokens=1, include_new=True, lengths=(35, 12, 8, 2, 1, 0, 17, 3, 9)
)


def check_skewed(listed: bool) -> None:
    batch = Batch(SKEWED)
    plan = cut(batch.plan(), sum(SKEWED.lengths))
    batch.work = PassList() if listed else None
    checks.accurate(batch, plan)


@pytest.mark.parametrize("listed", [False, True])
def test_fewer_merge_blocks_do_the_work_of_all(listed: bool) -> None:
    variant = WarpgroupVariant(2, False)
    assert variant.merge_columns(len(SKEWED.lengths)) * 4 == variant.merge_columns(1) == variant.merge_blocks
    check_skewed(listed)


MERGE_BREAKS = (
    ("sums overwritten while they are read", "__syncthreads();  // the last one's sums are read", ";"),
    ("the rest of a request's outputs left out", "block += block_columns() * FOLD", "block += MERGE_BLOCKS"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [b[1:] for b in MERGE_BREAKS], ids=[b[0] for b in MERGE_BREAKS])
def test_control_a_broken_merge_is_noticed(device: Device, old: str, new: str) -> None:
    device.old, device.new = old, new
    checks.must_fail(lambda: check_skewed(True))


def check_late(device: Device, lengths: tuple[int, ...]) -> None:
    """A pass of two layers: the kernel in front of the list writes lengths, requests and table, the one in front of a split
    queries and new rows."""
    batch = Batch(Case("late", dtype=BF16, heads=2, lengths=lengths))
    want, _ = batch.expected()
    kernel = device.load(WarpgroupVariant(1, False, listed=True), torch.device("cpu"))
    kept = [t.clone() for t in (batch.seq_lens, batch.req, batch.table)]
    plan, owner = cut(batch.plan(), 3), Owner()
    batch.seq_lens.fill_(1)
    batch.table.zero_()

    def write() -> None:
        for tensor, value in zip((batch.seq_lens, batch.req, batch.table), kept, strict=True):
            tensor.data.copy_(value)  # as a kernel writes: torch notes no other version

    kernel.before_list, kernel.previous = write, checks.outstanding(batch, 3)
    batch.work = PassList()
    for layer in range(2):
        batch.work.enter(layer, owner)
        out, _ = batch.run(plan)
        assert error(out, want) < checks.TOLERANCE[BF16]
        kernel.previous = None if layer else checks.outstanding(batch, 3)
    assert kernel.lists == 1


@pytest.mark.parametrize("lengths", [(3,), (30, 67), (200,)])
def test_nothing_of_the_previous_kernel_is_read_early(device: Device, lengths: tuple[int, ...]) -> None:
    check_late(device, lengths)


BREAKS = (
    ("a list read before its kernel has ended", "if (p.flags & FRESH_LIST) wait_for_previous_kernel();", ";"),
    ("lengths read early", "  wait_for_previous_kernel();\n  write_list(", "  write_list("),
    ("a slot in another thread's place", "line[tid] = first_slot(p, w, tid);", "line[tid ^ 1] = first_slot(p, w, tid);"),
    ("the share of another request", "s = find_share(p, item, lane);", "s = find_share(p, item ^ 1, lane);"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [b[1:] for b in BREAKS], ids=[b[0] for b in BREAKS])
def test_control_a_broken_list_is_noticed(device: Device, old: str, new: str) -> None:
    device.old, device.new = old, new
    checks.must_fail(lambda: check_late(device, (397, 67)))


def check_changed_lengths(lists: PassList) -> None:
    """Two passes of two layers, in inference mode and with nothing initialised in between; lengths change in place."""
    case = Case("changed", dtype=BF16, heads=2, lengths=(130, 9))
    with torch.inference_mode():
        batch, owner = Batch(case), Owner()
        plan = cut(batch.plan(), 3)
        batch.work = lists
        slots = batch.slots
        for lengths in ((130, 9), (5, 9)):
            batch.seq_lens.copy_(torch.tensor([n - case.tokens for n in lengths]))
            batch.slots = [s[:n] for s, n in zip(slots, lengths, strict=True)]
            batch.case = replace(case, lengths=lengths)
            want, _ = batch.expected()
            for layer in range(2):
                lists.enter(layer, owner)
                out, _ = batch.run(plan)
                assert error(out, want) < checks.TOLERANCE[BF16], lengths


def test_lengths_may_change_between_passes() -> None:
    check_changed_lengths(PassList())


def test_control_a_list_older_than_the_lengths_is_noticed() -> None:
    class Careless(PassList):
        def enter(self, layer: int, batch: Any) -> None:
            """No pass ever ends."""

    checks.must_fail(lambda: check_changed_lengths(Careless()))


def test_host_and_kernel_agree_on_a_line() -> None:
    assert library(WarpgroupVariant(1, False, listed=True)).list_line() == fused_build.WARPGROUP_LINE
