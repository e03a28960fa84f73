"""The two CUDA C++ launches on an emulated device: the product's own source, against the oracle and its own contracts.

The device emulated here is unkind on purpose (``emulated/``): copies land only when waited for, matrix instructions start when
waited for and read only what a fence made visible, what no barrier orders reads as NaN, the kernel before this one ends as late
as possible and what the split leaves lands when the merge waits for it.
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
from checks import cut
from emulation import EmulatedWarpgroup, library
from paged import Batch, Case, error
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify import fused_driver, launch, stamps
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.fused_driver import Params
from sglang.srt.layers.attention.verify.plan import DeviceTraits

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a C++ compiler")
BF16 = torch.bfloat16
TRAITS = DeviceTraits((9, 0), 8, warpgroup="always")
CASES = (
    *paged.COMMON,
    Case("ring-wraps", dtype=BF16, lengths=(2063,)),
    Case("16-heads", dtype=BF16, heads=16, tokens=2, lengths=(130,)),
    Case("5-heads", dtype=BF16, heads=5, tokens=1, lengths=(130,)),
    Case("fp16", dtype=torch.float16, lengths=(197,)),
    *(Case(f"x{x}", dtype=BF16, scale=float(x), lengths=(97,)) for x in (8, 50)),
)
# Ends of a tile, of half a tile and of the ring, and one beside them.
CHUNKS = (1, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 159, 160, 161, 192, 193, 224, 225)
# Two row tiles, the second not full; the other numbers of them are above.
SMALL = Case("small", dtype=BF16, heads=10, tokens=1, include_new=True)


class Device:
    """Takes the launches of the product; ``old`` and ``new`` are what a control writes differently, ``kernel`` goes first."""

    old = new = ""
    kernel: EmulatedWarpgroup | None = None

    def load(self, variant: WarpgroupVariant, device: torch.device) -> EmulatedWarpgroup:
        """What ``fused_driver.load`` would return."""
        return self.kernel or EmulatedWarpgroup(variant, self.old, self.new)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(paged, "device_traits", lambda: TRAITS)
    monkeypatch.setattr(fused_driver, "load", found.load)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_oracle(case: Case) -> None:
    batch = Batch(case)
    assert batch.plan().tile.kernel == "warpgroup"
    checks.accurate(batch)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("keys", CHUNKS)
def test_chunks(keys: int, pieces: int) -> None:
    batch = Batch(replace(SMALL, lengths=(keys * pieces,)))
    checks.accurate(batch, cut(batch.plan(), pieces))


# The ring turns several times: runs that end at any stage, one key before and behind it, with every number of row tiles.
RUNS = (256, 257, 288, 289, 319, 320, 321, 352, 353, 384, 385, 449, 480, 481, 512, 513, 545, 640, 641)
TILES = (
    Case("one-row-tile", dtype=BF16, heads=2),
    SMALL,
    Case("three-row-tiles-fp16", dtype=torch.float16),
    Case("four-row-tiles", dtype=BF16, heads=16, tokens=2),
)


@pytest.mark.parametrize("case", TILES, ids=lambda c: c.name)
def test_long_runs(case: Case) -> None:
    for keys in RUNS if case is SMALL else (353, 513, 545, 641):
        batch = Batch(replace(case, lengths=(keys,)))
        checks.accurate(batch, cut(batch.plan(), 1))


# A merge thread has one split, some that not all of its neighbours have, or more than it loads at once.
@pytest.mark.parametrize("pieces", [3, 16, 17, 35, pytest.param(141, marks=pytest.mark.slow)])
def test_pieces(pieces: int) -> None:
    batch = Batch(replace(SMALL, lengths=(pieces,)))
    checks.accurate(batch, cut(batch.plan(), pieces))


@pytest.mark.parametrize("contract", checks.CONTRACTS)
def test_contracts(contract: str) -> None:
    checks.CONTRACTS[contract]()


def check_late(device: Device, lengths: tuple[int, ...], keep: int) -> None:
    """Right although the last ``keep`` rows of each request come when the kernel in front has ended."""
    batch = Batch(Case("late", dtype=BF16, heads=2, lengths=lengths))
    want, _ = batch.expected()
    device.kernel = device.load(WarpgroupVariant(1, False), torch.device("cpu"))
    device.kernel.previous = checks.outstanding(batch, keep)
    try:
        out, _ = batch.run(cut(batch.plan(), 2))
    finally:
        device.kernel = None
    assert error(out, want) < checks.TOLERANCE[BF16]


@pytest.mark.parametrize("lengths", [(3,), (30, 67), (200,)])
def test_nothing_of_the_previous_kernel_is_read_early(device: Device, lengths: tuple[int, ...]) -> None:
    check_late(device, lengths, 3)


def test_control_older_rows_are_read_early(device: Device) -> None:
    """The contract covers the new rows only: with more outstanding, the check above must fail."""
    checks.must_fail(lambda: check_late(device, (200,), 83))


def check_peaks(dtype: torch.dtype, factors: tuple[float, ...]) -> None:
    """Every further tile of keys so many times larger: maxima of rows move by more than a weight may have bits."""
    case = Case("peaks", dtype=dtype, heads=2, lengths=(64 * len(factors),))
    batch = Batch(case)
    for i, factor in enumerate(factors):
        batch.k_pool[batch.slots[0][64 * i : 64 * (i + 1)]] *= factor
    out, _ = batch.run(cut(batch.plan(), 1))
    want, _ = batch.expected()
    assert error(out, want) < checks.TOLERANCE[dtype], error(out, want)


@pytest.mark.parametrize(
    ("dtype", "factors"),
    [(BF16, (1, 60, 1)), (BF16, (60, 1, 90)), (BF16, (0.01, 2, 4)), (torch.float16, (0.01, 8, 4))],
)
def test_later_keys_outweigh_earlier_ones(dtype: torch.dtype, factors: tuple[float, ...]) -> None:
    check_peaks(dtype, factors)


def check_all(device: Device) -> None:
    """What each control must break: blocks that merge and one alone, a ring that wraps, halves, late rows, growing scores."""
    check_late(device, (397, 67), 3)
    check_peaks(BF16, (1, 60, 1))


RELEASE = """\
    if (lane == 0) {
      barrier_arrive(empty + 8 * stage);
      if (whole) barrier_arrive(empty + 8 * stage + 8);
    }
"""
LAST_WAIT = "    products_done<0>();\n    settle(r);\n"
# What is wrong, what is written in place of what; the first ones run by default.
BREAKS = (
    ("values used before they are there", LAST_WAIT, "    settle(r);\n"),
    ("a stage given back before it is read", LAST_WAIT + RELEASE, RELEASE + LAST_WAIT),
    ("keys without a fence", "stage + 8, parity);\n    shared_to_matrix();", "stage + 8, parity);"),
    ("weights without a fence", "  shared_to_matrix();\n}", "}"),
    ("keys behind the chunk count", "causal < see.end ? causal : see.end", "causal"),
    ("new rows read early", "at + n > fresh", "at > fresh"),
    ("weights in one place", "r.p = 2 * AT_P + P_BYTES - r.p;", ";"),
    ("weights without a new maximum", "!warpgroup_any(larger)", "warpgroup_any(larger) || true"),
    (
        "the merge does not wait",
        "wait_for_previous_kernel();\n  STAMP(WAIT_OVER);\n  const int tid",
        "const int tid",
    ),
)
MORE_BREAKS = (
    ("a stage written before it is free", "barrier_wait(empty + 8 * stage, parity);", ";"),
    ("a swizzle left out", "((chunk ^ row) & 7)", "(chunk & 7)"),
    ("scores used before they are there", "products_done<0>();\n    settle(s);", "settle(s);"),
    ("keys that nobody waits for", "barrier_wait(full + 8 * stage, parity);", ";"),
    ("a second half that nobody waits for", "if (whole) barrier_wait(full + 8 * stage + 8, parity);", ";"),
    ("queries that nobody waits for", "copies_done();\n  shared_to_matrix();", "shared_to_matrix();"),
    ("queries of other warps not waited for", "warpgroup_sync();\n  STAMP(INPUTS_THERE);", ""),
    ("queries read early", "wait_for_previous_kernel();\n  STAMP(WAIT_OVER);\n  // Rows", "// Rows"),
    ("a tile's end not masked", " || see.at + KEYS > see.end", ""),
    ("causal limit ignored", "w.length - p.tokens + 1, tokens}", "w.length + 1, tokens}"),
    ("sums of values not scaled", "r.o[b][i] *= alpha[i >> 2][i & 1]", ";"),
    ("sums of weights not scaled", "r.l[j][c] *= alpha[j][c]", ";"),
    ("maxima not waited for", "top, Larger());\n  warpgroup_sync();", "top, Larger());"),
    ("weights not waited for", "[i & 1];\n  }\n  warpgroup_sync();", "[i & 1];\n  }"),
    ("sums of weights not waited for", "warpgroup_sync();  // all", "// all"),
    ("scores not behind their registers", "products_begin();\n#pragma unroll\n  for (int b", "for (int b"),
    ("values not behind their registers", "products_begin();\n#pragma unroll\n  for (int k", "for (int k"),
    ("values never sent", "    }\n  products_sent();", "    }"),
    ("the merge's groups not waited for", "m[1], n[1]);\n  __syncthreads();", "m[1], n[1]);"),
    ("a row tile's weights in the wrong place", "matrices(anew(sm + r.p), NT * 128, 128)", "matrices(anew(sm + r.p), 256, 128)"),
)  # fmt: skip


def test_what_the_controls_break_is_right(device: Device) -> None:
    check_all(device)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(pytest.param(*b[1:], id=b[0]) for b in BREAKS),
        *(pytest.param(*b[1:], id=b[0], marks=pytest.mark.slow) for b in MORE_BREAKS),
    ],
)
def test_control_a_broken_kernel_is_noticed(device: Device, old: str, new: str) -> None:
    device.old, device.new = old, new
    checks.must_fail(lambda: check_all(device))


@pytest.mark.parametrize(("lengths", "counts"), [((397,), (3,)), ((397, 200), (2, 2))])
def test_a_traced_launch_leaves_every_stamp_in_order_and_the_same_result(
    lengths: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    batch = Batch(Case("trace", dtype=BF16, heads=2, lengths=lengths))
    plan = cut(batch.plan(), 3)
    want, _ = batch.run(plan)
    variant = WarpgroupVariant(1, False)
    split = torch.full((plan.items, stamps.WIDTH), -1, dtype=torch.int64)
    merge = torch.full((len(lengths) * variant.merge_blocks, stamps.WIDTH), -1, dtype=torch.int64)
    out = torch.empty_like(want)
    x = launch.Operands(batch.q, batch.k_pool, batch.v_pool, out, None, (split, merge))
    launch.attend(plan, batch.workspace(plan), x, batch.context(), batch.sm_scale, 1.0, 1.0, 0.0)
    assert torch.equal(out, want)
    works = [{field: trace[:, i] for i, field in enumerate(stamps.FIELDS)} for trace in (split, merge)]
    assert int(works[0]["work"].sum()) == sum(lengths)
    # Every request has records of its own.
    assert works[1]["work"].tolist() == [n for n in counts for _ in range(variant.merge_blocks)]
    # Blocks of the merge that another one does the work of have no inputs.
    busy = [torch.ones(plan.items, dtype=torch.bool), works[1]["inputs_there"] > 0]
    assert busy[1].any()
    ends = ("timer_last", "written")
    orders = (
        (0, ("timer_first", "start", "lengths_read", "wait_over", "inputs_there", "first_keys_there", "last_keys_there",
             "left_for_others", "others_there", "products_done", *ends)),
        (0, ("slots_read", "first_copies_sent", "last_copies_sent")),
        (1, ("timer_first", "start", "lengths_read", "wait_over", "inputs_there", *ends)),
    )  # fmt: skip
    for stage, order in orders:
        at = works[stage]
        for before, after in pairwise(order):
            first, then = at[before][busy[stage]], at[after][busy[stage]]
            assert (first <= then).all() and (first > 0).all(), (before, after)


def test_queries_that_are_not_aligned_are_copied_and_counted_under_this_path() -> None:
    batch = Batch(Case("unaligned", dtype=BF16, heads=2, lengths=(67,)))
    want, _ = batch.run()
    wide = torch.empty(*batch.q.shape[:2], batch.q.shape[2] + 1, dtype=BF16)
    wide[..., :-1] = batch.q
    batch.q = wide[..., :-1]
    fallbacks.reset()
    assert torch.equal(batch.run()[0], want)
    assert list(fallbacks.snapshot()) == [fused_driver.WARPGROUP_PATH]
    fallbacks.reset()


def test_host_and_kernel_agree_on_sizes() -> None:
    for variant in (
        WarpgroupVariant(1, False),
        WarpgroupVariant(3, False),
        WarpgroupVariant(1, False, stages=4),
    ):
        found = library(variant)
        assert found.params_bytes() == ctypes.sizeof(Params)
        assert found.shared_bytes() == variant.shared_bytes()
        assert found.merge_bytes() == variant.merge_bytes()
        assert found.split_packets() == variant.split_packets
        assert found.merge_blocks() == variant.merge_blocks
