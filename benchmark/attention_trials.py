"""Other plans for verify attention of two launches on sm_90, to be timed against the present one.

``bench_attention --backends two-launches NAME ...`` times them in one run, ``attention_trace --paths NAME`` shows where
their time goes; the tests of the kernels run every one on an emulated device. What was tried this way and lost is in
docs/NEGATIVE_RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang.srt.layers.attention.verify.plan import SplitPlan

Change = Callable[[SplitPlan], SplitPlan]


def merge_fits(plan: SplitPlan) -> SplitPlan:
    """No shared memory that no split needs: 11 KiB a merge program at batch 1, not 17, so three fit beside a split.

    All 384 are then resident before the split ends, of 264. Worth nothing in a loop, and slower with a cold L2.
    """
    rounds = min(-(-plan.items // plan.merge.block_s), 32)
    return replace(plan, merge=replace(plan.merge, rounds=rounds))


def grain_16(plan: SplitPlan) -> SplitPlan:
    """Chunks cut to 16 keys, as they once were: 128 blocks at 64k and one of three keys."""
    return replace(plan, splits=replace(plan.splits, grain=16))


CHANGES: dict[str, Change] = {"merge-fits": merge_fits, "grain-16": grain_16}


def ring_128(plan: SplitPlan) -> SplitPlan:
    """Four stages of keys in the ring, not five."""
    return replace(plan, tile=replace(plan.tile, num_stages=4))


def paced(*pace: int) -> Change:
    """So many parts of 16 keys by 192 dims under way in the first stage, until the queries are there, and from then on."""
    first, early, later = pace
    return lambda plan: replace(plan, tile=replace(plan.tile, pace=(first, early, later)))


# As many under way as two stages hold, from the start: what these kernels once did.
unpaced = paced(12, 12, 12)
# Of the launches in CUDA C++.
WARPGROUP_CHANGES: dict[str, Change] = {
    "ring-128": ring_128,
    "unpaced": unpaced,
    "unpaced-128": lambda plan: unpaced(ring_128(plan)),
    "pace-3-3-8": paced(3, 3, 8),
    "pace-4-4-8": paced(4, 4, 8),
}


def warpgroup_applies(plan: SplitPlan) -> bool:
    """Whether those mean anything to ``plan``."""
    return plan.tile.kernel == "warpgroup"


def applies(plan: SplitPlan) -> bool:
    """Whether the changes mean anything to ``plan``: the sm_90 kernels with a 2-byte cache and up to 32 rows a program."""
    return plan.tile.kernel == "hopper" and plan.tile.num_warps == 4 and plan.tile.max_registers > 0
