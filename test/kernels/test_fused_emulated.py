"""The one-launch kernel on an emulated device: the product's own source, against the oracle and its own contracts.

The device emulated here is unkind on purpose (``emulated/device.h``): copies land only when waited for, the
kernel before this one ends as late as possible, packets arrive in halves, shared memory starts as NaN.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise

import checks
import emulation
import paged
import pytest
import torch
from emulation import DeviceError, EmulatedKernel, library
from paged import Batch, Case, error
from sglang.srt.layers.attention.verify import fused_build, fused_driver, launch, stamps
from sglang.srt.layers.attention.verify.fused_build import Variant, deepest
from sglang.srt.layers.attention.verify.fused_driver import Params
from sglang.srt.layers.attention.verify.plan import DeviceTraits

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a C++ compiler")
BF16 = torch.bfloat16
TRAITS = DeviceTraits((9, 0), 8, fused="always")
CASES = (
    *paged.COMMON,
    Case("ring-wraps", dtype=BF16, lengths=(1031,)),
    Case("16-heads", dtype=BF16, heads=16, tokens=2, lengths=(130,)),
    Case("5-heads", dtype=BF16, heads=5, tokens=1, lengths=(130,)),
    Case("fp16", dtype=torch.float16, lengths=(197,)),
    *(Case(f"fp8-k{k}", dtype=BF16, fp8=True, k_scale=k, lengths=(197, 5)) for k in (0.5, 2.0)),
    *(Case(f"x{x}", dtype=BF16, scale=float(x), lengths=(97,)) for x in (8, 50)),
)


@pytest.fixture(autouse=True)
def emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "device_traits", lambda: TRAITS)
    monkeypatch.setattr(fused_driver, "load", lambda variant, device: EmulatedKernel(variant))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_oracle(case: Case) -> None:
    batch = Batch(case)
    plan = batch.plan()
    assert plan.tile.kernel == "fused"
    space = batch.workspace(plan)
    checks.accurate(batch, plan, space)
    # What blocks hand each other is back to what it was, or the next launch would read it.
    assert (space.packets == -1).all() and (space.headers == -1).all()


@pytest.mark.parametrize("contract", checks.CONTRACTS)
def test_contracts(contract: str) -> None:
    checks.CONTRACTS[contract]()


def _late(batch: Batch, keep: int) -> EmulatedKernel:
    """A kernel whose predecessor still has to write the queries and the last ``keep`` cache rows of each request."""
    kernel = EmulatedKernel(Variant(3, False, False, 5))
    kernel.previous = checks.outstanding(batch, keep)
    return kernel


@pytest.mark.parametrize("lengths", [(3,), (30, 67), (200,)])
def test_nothing_of_the_previous_kernel_is_read_early(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(Case("early", dtype=BF16, lengths=lengths))
    want, _ = batch.expected()
    kernel = _late(batch, batch.case.tokens)
    monkeypatch.setattr(fused_driver, "load", lambda variant, device: kernel)
    out, _ = batch.run()
    assert error(out, want) < checks.TOLERANCE[BF16]


def test_control_older_rows_are_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract covers the new rows only: with one more outstanding, the check above must fail."""
    batch = Batch(Case("early", dtype=BF16, lengths=(200,)))
    want, _ = batch.expected()
    kernel = _late(batch, batch.case.tokens + 80)
    monkeypatch.setattr(fused_driver, "load", lambda variant, device: kernel)
    out, _ = batch.run()
    checks.must_fail(lambda: _accurate(out, want))


def _accurate(out: torch.Tensor, want: torch.Tensor) -> None:
    assert error(out, want) < checks.TOLERANCE[BF16]


BREAKS = (
    ("a copy that nobody waits for", "barrier_wait(full + 8 * stage, parity);", ";"),
    (
        "keys behind the chunk count",
        "s[h].w = seen > 3 ? s[h].w * scale : -1e38f;",
        "s[h].w = s[h].w * scale;",
    ),
    ("causal limit ignored", "w.length - p.tokens + row / p.heads + 1", "w.length"),
    (
        "packets left behind",
        "packet_put(from + (b0 + i * groups) * step, uint4{EMPTY, EMPTY, EMPTY, EMPTY});",
        ";",
    ),
)


@pytest.mark.parametrize(("old", "new"), [b[1:] for b in BREAKS], ids=[b[0] for b in BREAKS])
def test_control_a_broken_kernel_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_driver, "load", lambda variant, device: EmulatedKernel(variant, old, new))
    case = replace(CASES[0], lengths=(131,))
    checks.must_fail(lambda: test_oracle(case))


def test_control_a_block_that_never_comes_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks wait for each other; what would hang a device must end here, and say so."""
    old = " send(p, sm, tid, item, o);"
    monkeypatch.setattr(
        fused_driver, "load", lambda variant, device: EmulatedKernel(variant, old, f" if (item != 1){old}")
    )
    with pytest.raises(DeviceError, match=r"deadlock|gave up"):
        Batch(Case("hang", dtype=BF16, lengths=(131,))).run()


def test_a_traced_launch_leaves_every_stamp_in_order_and_the_same_result() -> None:
    batch = Batch(Case("trace", dtype=BF16, lengths=(397,)))
    plan = batch.plan()
    want, _ = batch.run(plan)
    trace = torch.full((plan.items, stamps.WIDTH), -1, dtype=torch.int64)
    out = torch.empty_like(want)
    x = launch.Operands(batch.q, batch.k_pool, batch.v_pool, out, None, (trace, trace))
    launch.attend(plan, batch.workspace(plan), x, batch.context(), batch.sm_scale, 1.0, 1.0, 0.0)
    assert torch.equal(out, want)
    at = {field: trace[:, i] for i, field in enumerate(stamps.FIELDS)}
    assert int(at["work"].sum()) == 397
    busy = at["work"] > 0
    order = ("timer_first", "start", "lengths_read", "wait_over", "inputs_there", "first_keys_there", "last_keys_there",
             "products_done", "left_for_others", "others_there", "timer_last", "written")  # fmt: skip
    for before, after in (
        *pairwise(order),
        *pairwise(("slots_read", "first_copies_sent", "last_copies_sent")),
    ):
        assert (at[before][busy] <= at[after][busy]).all() and (at[before][busy] > 0).all(), (before, after)


def test_host_and_kernel_agree_on_sizes() -> None:
    for variant in (Variant(3, False, False, 5), Variant(3, False, True, 8)):
        found = library(variant)
        assert found.params_bytes() == ctypes.sizeof(Params)
        assert found.shared_bytes() == variant.shared_bytes()


def test_every_variant_fits_its_architecture() -> None:
    for capability, limit in fused_build.SHARED_LIMIT.items():
        for tiles in (1, 2, 3, 4):
            for fp8 in (False, True):
                variant = deepest(tiles, False, fp8, capability)
                assert variant is not None and variant.shared_bytes() <= limit
    assert deepest(3, False, False, (8, 0)) is None
