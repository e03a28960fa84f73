"""The Gluon kernels of two launches (``hopper``, ``merge_gpu``) on an emulated device, also what is only being tried.

``gluon_device`` says what that device is unkind about. The plans are those of an H200 with fewer multiprocessors.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import checks
import gluon_device
import paged
import pytest
import torch
from paged import Batch, Case, error, lse_error
from sglang.srt.layers.attention.verify import hopper, hopper_copy, launch, merge_gpu, stamps
from sglang.srt.layers.attention.verify.plan import DeviceTraits

from benchmark.attention_trials import CHANGES, applies

BF16 = torch.bfloat16
TRAITS = DeviceTraits((9, 0), 8)
CASES = (
    Case("lengths", dtype=BF16, heads=2, lengths=(3, 4, 67)),
    Case("padding", dtype=BF16, heads=2, lengths=(0, 131, 0, 5)),
    Case("ring-wraps", dtype=BF16, heads=3, lengths=(1613,)),
    Case("kv-indices-new", dtype=BF16, heads=2, indices=True, include_new=True, lengths=(3, 97)),
    Case("decode", dtype=BF16, tokens=1, include_new=True, lengths=(1, 2, 130)),
    Case("16-heads", dtype=BF16, heads=16, tokens=3, lengths=(130,)),
    Case("64-heads", dtype=BF16, heads=64, tokens=1, lengths=(130,)),
    Case("page-64", dtype=BF16, heads=2, page=64, lengths=(197, 5)),
    *(Case(f"fp8-k{k}", dtype=BF16, tokens=1, fp8=True, k_scale=k, lengths=(197, 5)) for k in (0.5, 2.0)),
    *(Case(f"x{x}", dtype=BF16, tokens=1, scale=float(x), lengths=(97,)) for x in (8, 50)),
)


class Device:
    """Takes the launches of the product; ``previous`` is what the kernel before the next split still owes."""

    previous: gluon_device.Previous | None = None

    def run(self, one: launch.Launch, args: tuple[object, ...], more: dict[str, object]) -> None:
        """Run one launch; whatever comes before it ends as late as it can."""
        previous = self.previous if one.kernel is hopper.mla_split_kernel else None
        gluon_device.run(one, args, more, previous or gluon_device.Previous())


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(paged, "device_traits", lambda: TRAITS)
    monkeypatch.setattr(launch.Launch, "run", lambda one, *args, **more: found.run(one, args, more))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_oracle(case: Case) -> None:
    batch = Batch(case)
    plan = batch.plan()
    assert plan.tile.kernel == "hopper"
    checks.accurate(batch, plan)


# Many splits of one request, so that the merge takes several rounds (three of 32, five of 16, nine of 8), and a batch with
# padding in which some requests have one split.
TRIED = (
    Case("rounds", dtype=BF16, tokens=1, heads=2, include_new=True, lengths=(1037,)),
    Case("mixed", dtype=BF16, tokens=2, heads=1, lengths=(0, 131, 5)),
)


@pytest.mark.parametrize("case", TRIED, ids=lambda c: c.name)
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_being_tried_is_right(name: str, case: Case) -> None:
    batch = Batch(case)
    plan = checks.with_target(batch.plan(), 65 if case.name == "rounds" else 8)
    assert applies(plan)
    checks.accurate(batch, CHANGES[name](plan))


class Writer(gluon_device.Previous):
    """A kernel in front that writes the queries and the last ``keep`` cache rows of each request."""

    def __init__(self, batch: Batch, keep: int) -> None:
        self.batch = batch
        self.where = torch.cat([s[len(s) - keep :] for s in batch.slots])
        self.rows, self.q = batch.k_pool[self.where].clone(), batch.q.clone()

    def owe(self) -> None:
        self.batch.k_pool[self.where] = float("nan")
        self.batch.q.fill_(float("nan"))

    def end(self) -> None:
        self.batch.k_pool[self.where] = self.rows
        self.batch.q.copy_(self.q)


EARLY = Case("early", dtype=BF16, tokens=2, heads=1, lengths=(200,))


@pytest.mark.parametrize("lengths", [(2,), (30, 67), (200,)])
def test_nothing_of_the_previous_kernel_is_read_early(lengths: tuple[int, ...], device: Device) -> None:
    batch = Batch(replace(EARLY, lengths=lengths))
    want, _ = batch.expected()
    device.previous = Writer(batch, batch.case.tokens)
    out, _ = batch.run(batch.plan())
    assert error(out, want) < checks.TOLERANCE[BF16]


def test_control_older_rows_are_read_early(device: Device) -> None:
    """What a kernel directly in front may not do (see ``KVContext``): write rows older than this call's tokens."""
    batch = Batch(EARLY)
    want, _ = batch.expected()
    device.previous = Writer(batch, batch.case.tokens + 80)
    out, _ = batch.run()
    assert error(out, want) == float("inf")


CONTROLS: tuple[tuple[str, ModuleType, str, str], ...] = (
    ("keys nobody waits for", hopper, "mbarrier.wait(full.index(stage), phase)", "pass"),
    (
        "a product before the fence",
        hopper,
        "fence_async_shared()\n        gl.thread_barrier()\n        s =",
        "s =",
    ),
    ("tiles overwritten", hopper_copy, "mbarrier.wait(empty.index(stage), phase)", "pass"),
    ("new rows too early", hopper_copy, "if start + N > length - TOKENS:", "if start < 0:"),
    ("queries too early", hopper, "    if CHAIN:\n        cuda.gdc_wait()\n    if trace", "    if trace"),
    ("causal limit ignored", hopper, "length - TOKENS + row // HEADS + 1)", "length + 0 * row)"),
    ("partial results nobody waits for", merge_gpu, "async_copy.wait_group(0)", "pass"),
    ("merge too early", merge_gpu, "    if EARLY_MERGE:\n        cuda.gdc_wait()\n", ""),
    ("log-sum-exps of another split", hopper, "LSE_ITEMS + gl.program_id(0)", "LSE_ITEMS"),
    ("weights of the wrong split", merge_gpu, "weights.index(i).load", "weights.index(0).load"),
)


@pytest.mark.parametrize(("module", "old", "new"), [c[1:] for c in CONTROLS], ids=[c[0] for c in CONTROLS])
def test_control_a_broken_kernel_is_noticed(module: ModuleType, old: str, new: str, device: Device) -> None:
    batch = Batch(replace(EARLY, lengths=(650,)))
    want, want_lse = batch.expected()

    def check() -> None:
        device.previous = Writer(batch, batch.case.tokens)
        # Few splits, so that the ring wraps; many, so that the merge takes two rounds.
        for target in (3, 80):
            plan = checks.with_target(batch.plan(), target)
            out, lse = batch.run(CHANGES["merge-fits"](plan))
            assert error(out, want) < checks.TOLERANCE[BF16]
            assert lse_error(lse, want_lse) < checks.LSE_TOLERANCE

    with gluon_device.breaking(module, old, new):
        checks.must_fail(check)


def test_a_traced_launch_leaves_every_stamp_in_order_and_the_same_result() -> None:
    batch = Batch(replace(EARLY, lengths=(397,)))
    plan = batch.plan()
    want, _ = batch.run(plan)
    split = torch.full((plan.items, stamps.WIDTH), -1, dtype=torch.int64)
    merge = torch.full((2 * 16, stamps.WIDTH), -1, dtype=torch.int64)
    out = torch.empty_like(want)
    x = launch.Operands(batch.q, batch.k_pool, batch.v_pool, out, None, (split, merge))
    launch.attend(plan, batch.workspace(plan), x, batch.context(), batch.sm_scale, 1.0, 1.0, 0.0)
    assert torch.equal(out, want)

    def column(records: torch.Tensor, field: str) -> torch.Tensor:
        return records[:, stamps.FIELDS.index(field)]

    assert int(column(split, "work").sum()) == 397
    busy = split[column(split, "work") > 0]
    assert (busy[:, : stamps.FIELDS.index("left_for_others")] >= 0).all()
    for order in (
        ("timer_first", "start", "wait_over", "inputs_there", "first_keys_there", "last_keys_there", "products_done"),
        ("start", "lengths_read", "slots_read", "first_copies_sent", "first_keys_there"),
        ("last_copies_sent", "last_keys_there"),
        ("products_done", "timer_last", "written"),
    ):  # fmt: skip
        for before, after in pairwise(order):
            assert (column(busy, before) <= column(busy, after)).all(), (before, after)
    for before, after in (
        ("start", "lengths_read"),
        ("lengths_read", "wait_over"),
        ("wait_over", "inputs_there"),
    ):
        assert (column(merge, before) < column(merge, after)).all()
    assert (column(merge, "inputs_there") < column(merge, "written")).all()
