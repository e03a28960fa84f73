"""What may make verify attention of two launches faster on sm_90, as changes of a plan: none is on by default.

``bench_attention --backends two-launches NAME ...`` times them against the present path in one run; the tests of the
kernels run every one on an emulated device. docs/verify-attention.md says what each is expected to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.table import Merge

Change = Callable[[SplitPlan], SplitPlan]


def _rounds(plan: SplitPlan, block_s: int) -> int:
    """As many rounds as the splits of the largest request need, no more."""
    return min(-(-plan.items // block_s), 32)


def merge_fits(plan: SplitPlan) -> SplitPlan:
    """No shared memory that no split needs: 11 KiB a program at batch 1, not 17, so three fit beside a split.

    Then all 384 are resident before the split ends. Today 264 are; the others start where the first splits end, twelve a
    multiprocessor, and keep the next call's splits away from there until this merge is over.
    """
    return replace(plan, merge=replace(plan.merge, rounds=_rounds(plan, plan.merge.block_s)))


def merge_64(plan: SplitPlan) -> SplitPlan:
    """192 programs of two warps and 64 columns; two fit beside a split."""
    return replace(plan, merge=Merge(16, _rounds(plan, 16), 64, 2))


def merge_128(plan: SplitPlan) -> SplitPlan:
    """96 programs of four warps and 128 columns; one fits beside a split."""
    return replace(plan, merge=Merge(8, _rounds(plan, 8), 128, 4))


def lse_by_row(plan: SplitPlan) -> SplitPlan:
    """Log-sum-exps of a row side by side: 17 sectors a merge program and not 132."""
    return replace(plan, trial=replace(plan.trial, lse_by_row=True))


def slots_stay(plan: SplitPlan) -> SplitPlan:
    """Slot indices are kept in L2: from 64k on keys push them out, and every layer reads them from memory first."""
    return replace(plan, trial=replace(plan.trial, slots_stay=True))


def lead_producers(plan: SplitPlan) -> SplitPlan:
    """The copying warps need no dispatch, so the first slots are asked for sooner."""
    return replace(plan, trial=replace(plan.trial, lead_producers=True))


def even(plan: SplitPlan) -> SplitPlan:
    """Chunks cut to the key: all 132 multiprocessors pull at 64k, not 128 and one with three keys."""
    return replace(plan, splits=replace(plan.splits, grain=1))


def _aim(target: int) -> Change:
    def change(plan: SplitPlan) -> SplitPlan:
        items = min(plan.items, target + plan.request.batch - 1)
        return merge_fits(replace(plan, target=min(plan.target, target), items=items))

    return change


def together(plan: SplitPlan) -> SplitPlan:
    """Everything that neither costs memory nor work."""
    for change in (merge_fits, lse_by_row, slots_stay, lead_producers):
        plan = change(plan)
    return plan


CHANGES: dict[str, Change] = {
    "merge-fits": merge_fits,
    "merge-64": merge_64,
    "merge-128": merge_128,
    "lse-by-row": lse_by_row,
    "slots-stay": slots_stay,
    "lead-producers": lead_producers,
    "even": even,
    # Room for merge programs on multiprocessors without a split; every second multiprocessor, so that calls take turns.
    "aim-120": _aim(120),
    "aim-66": _aim(66),
    "together": together,
    "together-even": lambda plan: even(together(plan)),
    "together-64": lambda plan: merge_64(together(plan)),
}


def applies(plan: SplitPlan) -> bool:
    """Whether the changes mean anything to ``plan``: the sm_90 kernels with a 2-byte cache and up to 32 rows a program."""
    return plan.tile.kernel == "hopper" and plan.tile.num_warps == 4 and plan.tile.max_registers > 0
