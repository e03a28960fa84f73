"""The ring of keys of ``warpgroup.cu`` on the emulated device: its turns, its end, slots that are read in batches, parts under way.

An odd number of stages of 32 keys, tiles of 64, slots of 128: a run of several turns meets every way they can lie to each other.
"""

from __future__ import annotations

import checks
import emulation
import paged
import pytest
import torch
from checks import cut
from emulation import EmulatedWarpgroup
from paged import Batch, Case
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.plan import DeviceTraits

from benchmark.attention_trials import WARPGROUP_CHANGES, Change

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a C++ compiler")
TRAITS = DeviceTraits((9, 0), 8, warpgroup="always")
# Of a block: two halves at the end, a half at the ring's end, a half behind it, three turns and each of these again.
RUNS = (65, 129, 161, 321, 385, 545, 641)


class Device:
    """Takes the launches of the product; ``old`` and ``new`` are what a control writes differently."""

    old = new = ""

    def load(self, variant: WarpgroupVariant, device: torch.device) -> EmulatedWarpgroup:
        """What ``fused_driver.load`` would return."""
        return EmulatedWarpgroup(variant, self.old, self.new)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(paged, "device_traits", lambda: TRAITS)
    monkeypatch.setattr(fused_driver, "load", found.load)
    return found


def check_runs(runs: tuple[int, ...] = RUNS, change: Change = lambda plan: plan) -> None:
    """Blocks of so many keys, alone and as one of two."""
    for keys in runs:
        for pieces in (1, 2):
            batch = Batch(Case("run", dtype=torch.bfloat16, heads=2, lengths=(keys * pieces,)))
            checks.accurate(batch, change(cut(batch.plan(), pieces)))


def test_runs() -> None:
    check_runs()


# Every other ring and pace that the bench can ask for.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "unpaced-128")) for n in WARPGROUP_CHANGES]
)
def test_other_rings_and_paces(name: str) -> None:
    check_runs(change=WARPGROUP_CHANGES[name])


@pytest.mark.slow
def test_runs_of_every_length_up_to_several_turns() -> None:
    check_runs(tuple(range(4, 720, 11)))


TURN = "stage = 0;\n      parity ^= 1;"
# What is wrong, what is written in place of what; the first ones run by default.
BREAKS = (
    ("a tile over the ring's end", "whole = stage + 1 < STAGES && left", "whole = left"),
    (
        "another stride of blocks in the scores",
        "(b * BLOCK_BYTES + k * 32)",
        "(b * 4 * STAGE_BYTES + k * 32)",
    ),
    ("slots of a ring", "++known == SLOT_STAGES", "++known == STAGES"),
    (
        "the copies' parity",
        f"(++stage == STAGES) {{\n      {TURN}",
        "(++stage == STAGES) {\n      stage = 0;",
    ),
    ("a garbage score", "< limit ? x : -1e38f", "< limit ? x : x - 1e38f"),
    ("no pace", "if (i % PART_LINES == PART_LINES - 1) part_sent();", ""),
)
MORE_BREAKS = (
    ("another stride of blocks in the values", "(b * BLOCK_BYTES + k * 2048)", "(b * 4 * STAGE_BYTES + k * 2048)"),
    ("another stride of blocks in the copies", "here + i * BLOCK_BYTES", "here + i * 4 * STAGE_BYTES"),
    ("slots by stage", "known * MINE", "stage * MINE"),
    ("slots behind the ring", "at + SLOTS + my.mine", "at + STAGES * STAGE_KEYS + my.mine"),
    ("slots read in every stage", "if (known == 0) next", "next"),
    ("slots never turned", "slot = next;", ";"),
    ("the products' parity", f"(stage == STAGES) {{\n      {TURN}", "(stage == STAGES) {\n      stage = 0;"),
    ("the first stage of the second turn not waited for", "done >= STAGES * STAGE_KEYS", "done > STAGES * STAGE_KEYS"),
    ("a second half kept", "      if (whole) barrier_arrive(empty + 8 * stage + 8);\n", ""),
    ("values of rows behind a half", "if (k < 2 || whole)", "if (k < 4)"),
    ("half a tile as a whole one", "const int end = at + (whole ? KEYS : STAGE_KEYS)", "const int end = at + KEYS"),
    ("the last rows of a stage not zeros", "my.row0 + 4 * g < n", "my.row0 + 4 * g < STAGE_KEYS"),
    ("the first stage's pace", "parts_under_way<PACE_FIRST - 1>", "parts_under_way<PACE_EARLY - 1>"),
    ("the pace before the queries", "parts_under_way<PACE_EARLY - 1>", "parts_under_way<PACE - 1>"),
    ("the pace behind the queries", "parts_under_way<PACE - 1>", "parts_under_way<PACE>"),
    ("the merge's sums not aligned", "SPREAD = 40", "SPREAD = 36"),
    ("the merge's sums over each other", "SPREAD = 40", "SPREAD = 24"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(pytest.param(*b[1:], id=b[0]) for b in BREAKS),
        *(pytest.param(*b[1:], id=b[0], marks=pytest.mark.slow) for b in MORE_BREAKS),
    ],
)
def test_control_a_broken_ring_is_noticed(device: Device, old: str, new: str) -> None:
    device.old, device.new = old, new
    checks.must_fail(check_runs)
