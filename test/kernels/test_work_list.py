"""The work list of a forward pass: when it is written anew, and what kernels that read it make of it, on the emulated device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import checks
import emulation
import paged
import pytest
import torch
from emulation import EmulatedWarpgroup, library
from paged import Batch, Case, error
from sglang.srt.layers.attention.verify import fused_build, fused_driver, hooks, work_list
from sglang.srt.layers.attention.verify.binding import Binding, Scratch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan, make_plan
from sglang.srt.layers.attention.verify.work_list import PassList

BF16 = torch.bfloat16
TRAITS = DeviceTraits((9, 0), 8, warpgroup="always")
emulated = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a C++ compiler")


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


# --- when a list is written ---------------------------------------------------------------------------------------


class Pass:
    """Calls of one batch object, whose tensors a test may change."""

    def __init__(self) -> None:
        self.work = PassList()
        self.batch: Any = Owner()
        self.context = KVContext(
            seq_lens=torch.tensor([70, 9]),
            lens_include_new=False,
            req_to_token=torch.zeros(4, 80, dtype=torch.int32),
            req_pool_indices=torch.tensor([1, 2]),
        )
        self.plan: SplitPlan = make_plan(Batch(Case("key", dtype=BF16, lengths=(70, 9))).request, TRAITS, 80)
        self.stream, self.capture = 7, 0

    def layer(self, number: int) -> bool:
        """Whether a call of this layer writes a list."""
        self.work.enter(number, self.batch)
        return self.work.take(self.plan, self.context, self.stream, self.capture)[1]


def test_one_list_serves_the_layers_of_a_pass() -> None:
    it = Pass()
    assert [it.layer(n) for n in (0, 1, 2, 5)] == [True, False, False, False]


@pytest.mark.parametrize("again", [(0,), (1,), (5,), (-1,)], ids=str)
def test_a_layer_that_is_not_above_the_last_begins_a_pass(again: tuple[int, ...]) -> None:
    it = Pass()
    assert it.layer(1) and not it.layer(5)
    assert it.layer(*again)


def other_tensor(it: Pass, name: str) -> None:
    it.context = replace(it.context, **{name: getattr(it.context, name).clone()})


CHANGES: dict[str, Callable[[Pass], Any]] = {
    "metadata initialised": lambda it: it.work.begin(),
    "another batch object": lambda it: setattr(it, "batch", Owner()),
    "lengths changed in place": lambda it: it.context.seq_lens.add_(1),
    "lengths changed in place through a view": lambda it: it.context.seq_lens[:1].add_(1),
    "table changed in place": lambda it: it.context.req_to_token[0].zero_(),  # type: ignore[index]
    "other lengths": lambda it: other_tensor(it, "seq_lens"),
    "other requests": lambda it: other_tensor(it, "req_pool_indices"),
    "another table": lambda it: other_tensor(it, "req_to_token"),
    "another width of the table": lambda it: setattr(
        it, "context", replace(it.context, req_to_token=it.context.req_to_token.view(8, 40))  # type: ignore[union-attr]
    ),
    "lengths count the new": lambda it: setattr(it, "context", replace(it.context, lens_include_new=True)),
    "another stream": lambda it: setattr(it, "stream", 8),
    "a capture": lambda it: setattr(it, "capture", 3),
    "more chunks": lambda it: setattr(it, "plan", replace(it.plan, target=it.plan.target + 1)),
    "a larger grid": lambda it: setattr(it, "plan", replace(it.plan, items=it.plan.items + 1)),
    "other least keys": lambda it: setattr(
        it, "plan", replace(it.plan, splits=replace(it.plan.splits, min_keys=1))
    ),
    "more tokens": lambda it: setattr(
        it, "plan", replace(it.plan, request=replace(it.plan.request, tokens=2))
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_list_depends_on_writes_it_anew(change: str) -> None:
    it = Pass()
    assert it.layer(0) and not it.layer(1)
    CHANGES[change](it)
    assert it.layer(2)
    assert not it.layer(3)


def test_in_inference_mode_the_next_pass_sees_lengths_changed_in_place() -> None:
    """Tensors have no version there, so nothing but the order of the layers tells passes apart."""
    with torch.inference_mode():
        it = Pass()
        assert it.layer(0) and not it.layer(1)
        it.context.seq_lens.add_(1)
        assert it.layer(0)


def test_an_address_means_one_tensor_as_long_as_a_list_is_kept() -> None:
    it = Pass()
    it.layer(0)
    lengths = weakref.ref(it.context.seq_lens)
    other_tensor(it, "seq_lens")
    gc.collect()
    assert lengths() is not None
    it.work.begin()
    assert lengths() is None


def test_batch_objects_that_cannot_be_told_apart_share_nothing() -> None:
    it = Pass()
    it.batch = 5
    assert it.layer(0) and it.layer(1)


def test_the_batch_object_is_not_kept() -> None:
    it = Pass()
    it.layer(0)
    batch = weakref.ref(it.batch)
    it.batch = Owner()
    gc.collect()
    assert batch() is None
    assert it.layer(1)


# --- who says where a pass begins ---------------------------------------------------------------------------------


class ForwardMode:
    """A decode, of a draft step or not."""

    is_target_verify = is_draft_extend_v2 = staticmethod(lambda: False)
    is_decode = staticmethod(lambda: True)


class ForwardBatch(Owner):
    """What the hooks read of upstream's."""

    forward_mode, spec_info, batch_size = ForwardMode(), None, 2

    def __init__(self) -> None:
        self.seq_lens = self.positions = torch.tensor([70, 9])
        self.req_pool_indices = torch.tensor([1, 2])


class Model:
    """A backend with a binding; its layers attend through the product's hooks."""

    def __init__(self, layers: int = 61) -> None:
        table = torch.zeros(4, 80, dtype=torch.int32)
        self.fork_verify_binding = Binding(None, None, 1, 80, table, Scratch("cpu"), layers=layers)
        self.plan = Pass().plan
        self.wrote: list[bool] = []

    def layer(self, number: int, batch: ForwardBatch) -> bool | None:
        """Whether the layer writes a list; None if it has none."""
        q = torch.empty(2, 8, 576)
        layer = SimpleNamespace(layer_id=number, is_cross_attention=False, sliding_window_size=-1)
        found: bool | None = hooks.forward_decode(self._attend, self, q, None, None, layer, batch)
        return found

    @staticmethod
    def _attend(self: Model, *args: Any) -> bool | None:
        binding = self.fork_verify_binding
        call, binding.current = binding.current, None
        assert call is not None
        work = binding.work_for(call.mode)
        return None if work is None else work.take(self.plan, call.context, 7, 0)[1]


INITS: dict[str, Callable[[Model, ForwardBatch], Any]] = {
    "eager": lambda m, b: hooks.init_metadata(lambda *a: None, m, b),
    "capture": lambda m, b: hooks.init_metadata_out_graph(lambda *a, **k: None, m, b, in_capture=True),
    "replay": lambda m, b: hooks.init_metadata_out_graph(lambda *a, **k: None, m, b),
}


@pytest.mark.parametrize("init", INITS)
def test_metadata_and_layers_say_where_a_pass_begins(init: str) -> None:
    model, batch = Model(), ForwardBatch()
    assert [model.layer(n, batch) for n in (0, 1, 2)] == [True, False, False]
    INITS[init](model, batch)
    assert [model.layer(n, batch) for n in (3, 4)] == [True, False]
    # A warm-up run, a repeated capture: nothing was initialised.
    assert [model.layer(n, batch) for n in (0, 1)] == [True, False]


def test_two_batches_that_take_turns_never_share_a_list() -> None:
    model, batches = Model(), (ForwardBatch(), ForwardBatch())
    assert all(model.layer(n, batch) for n in (0, 1) for batch in batches)


def test_a_draft_step_and_a_model_of_few_layers_have_no_list() -> None:
    assert Model(layers=1).layer(0, ForwardBatch()) is None
    model, batch = Model(), ForwardBatch()
    assert model.fork_verify_binding.work_for("draft_decode") is None
    assert model.layer(0, batch) is True


# --- what kernels make of it --------------------------------------------------------------------------------------

CASES = (
    Case("lengths", dtype=BF16, lengths=(3, 4, 67)),
    Case("padding", dtype=BF16, lengths=(0, 131, 0, 5)),
    Case("several-blocks", dtype=BF16, lengths=(397,)),
    Case("ring-wraps", dtype=BF16, lengths=(2063,)),
    Case("kv-indices-new", dtype=BF16, indices=True, include_new=True, lengths=(3, 97)),
    Case("decode", dtype=BF16, tokens=1, include_new=True, lengths=(1, 2, 130)),
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


@emulated
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


@emulated
@pytest.mark.parametrize("contract", checks.CONTRACTS)
def test_contracts(contract: str, calls_alone: None) -> None:
    checks.CONTRACTS[contract]()


def cut(plan: SplitPlan, pieces: int) -> SplitPlan:
    """``plan`` with about ``pieces`` pieces, however short."""
    splits = replace(plan.splits, grain=1, min_keys=1)
    return replace(plan, target=pieces, items=pieces + plan.request.batch - 1, splits=splits)


# Requests with very many, many, some, few blocks and one, and none: every way to share the work of a merge.
SKEWED = Case(
    "skewed", dtype=BF16, heads=10, tokens=1, include_new=True, lengths=(35, 12, 8, 2, 1, 0, 17, 3, 9)
)


def check_skewed(listed: bool) -> None:
    batch = Batch(SKEWED)
    plan = cut(batch.plan(), sum(SKEWED.lengths))
    batch.work = PassList() if listed else None
    checks.accurate(batch, plan)


@emulated
@pytest.mark.parametrize("listed", [False, True])
def test_fewer_merge_blocks_do_the_work_of_all(listed: bool) -> None:
    variant = WarpgroupVariant(2, False)
    assert variant.merge_columns(len(SKEWED.lengths)) * 4 == variant.merge_columns(1) == variant.merge_blocks
    check_skewed(listed)


MERGE_BREAKS = (
    ("sums overwritten while they are read", "__syncthreads();  // the last one's sums are read", ";"),
    ("the rest of a request's outputs left out", "block += block_columns() * FOLD", "block += MERGE_BLOCKS"),
)  # fmt: skip


@emulated
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


@emulated
@pytest.mark.parametrize("lengths", [(3,), (30, 67), (200,)])
def test_nothing_of_the_previous_kernel_is_read_early(device: Device, lengths: tuple[int, ...]) -> None:
    check_late(device, lengths)


BREAKS = (
    ("a list read before its kernel has ended", "if (p.flags & FRESH_LIST) wait_for_previous_kernel();", ";"),
    ("lengths read early", "  wait_for_previous_kernel();\n  write_list(", "  write_list("),
    ("a slot in another thread's place", "line[tid] = first_slot(p, w, tid);", "line[tid ^ 1] = first_slot(p, w, tid);"),
    ("the share of another request", "s = find_share(p, item, lane);", "s = find_share(p, item ^ 1, lane);"),
)  # fmt: skip


@emulated
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


@emulated
def test_lengths_may_change_between_passes() -> None:
    check_changed_lengths(PassList())


@emulated
def test_control_a_list_older_than_the_lengths_is_noticed() -> None:
    class Careless(PassList):
        def enter(self, layer: int, batch: Any) -> None:
            """No pass ever ends."""

    checks.must_fail(lambda: check_changed_lengths(Careless()))


@emulated
def test_a_block_may_hold_back_keys_until_the_queries_are_there() -> None:
    """What is only being tried: one stage under way, then two."""
    batch = Batch(Case("paced", dtype=BF16, heads=2, lengths=(397,)))
    plan = batch.plan()
    want, _ = batch.run(plan)
    plan = replace(plan, tile=replace(plan.tile, pace_early=1))
    for lists in (None, PassList()):
        batch.work = lists
        assert torch.equal(batch.run(plan)[0], want)


@emulated
def test_host_and_kernel_agree_on_a_line() -> None:
    assert library(WarpgroupVariant(1, False, listed=True)).list_line() == fused_build.WARPGROUP_LINE
    paced = WarpgroupVariant(1, False, pace_early=1)
    assert library(paced).shared_bytes() == paced.shared_bytes()
