"""Every configuration that the table can choose, compiled ahead of time: shared memory, registers, spills.

No device is needed: Triton brings its assembler. A short list runs by default, all of them with ``-m slow``
(ktransformers#1570 is the report: a kernel that needs more shared memory than the card has).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
from aot import Resources, compile_plan
from sglang.srt.layers.attention.verify.admission import GQA_HEAD_DIMS, AttentionRequest
from sglang.srt.layers.attention.verify.launch import CallForm
from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan, make_plan

from benchmark.attention_trials import CHANGES

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHARED_LIMIT = {90: 232_448, 100: 232_448, 120: 101_376}
SM_COUNT = {90: 132, 100: 148, 120: 188}
CAPABILITY = {90: (9, 0), 100: (10, 0), 120: (12, 0)}
MATRIX = {90: ("HGMMA",), 100: ("UTCHMMA", "HMMA"), 120: ("HMMA",)}


@dataclass(frozen=True)
class Compiled:
    """One configuration and how many bytes of stack frame it may have (0: nothing spills)."""

    arch: int
    kind: str = "mla"
    tokens: int = 3
    heads: int = 8
    kv_heads: int = 1
    dim: int = 512
    kv: torch.dtype = BF16
    batch: int = 1
    mask: str = "none"
    spill: int = 0

    def __str__(self) -> str:
        kv = "fp8" if self.kv == FP8 else "bf16"
        shape = f"{self.kind}-d{self.dim}-h{self.heads}x{self.kv_heads}-t{self.tokens}"
        return f"sm_{self.arch}-{shape}-{kv}-bs{self.batch}-{self.mask}"

    def plan(self) -> SplitPlan:
        mla = self.kind == "mla"
        request = AttentionRequest(
            kind=self.kind,  # type: ignore[arg-type]
            batch=self.batch,
            tokens=self.tokens,
            q_heads=self.heads,
            kv_heads=self.kv_heads,
            qk_dim=576 if mla else self.dim,
            v_dim=self.dim,
            q_dtype=BF16,
            kv_dtype=self.kv,
            capability=CAPABILITY[self.arch],
            mask=self.mask,  # type: ignore[arg-type]
        )
        return make_plan(request, DeviceTraits(CAPABILITY[self.arch], SM_COUNT[self.arch]), 131_072)


# Eight consumer warps of 64 rows, and fp8 widened beside 32 rows, do not quite fit the register file; at 64
# requests the search for the work item spills a few bytes once, before the loop.
DEFAULT = (
    Compiled(90),
    Compiled(90, tokens=1),
    Compiled(90, kv=FP8, spill=128),
    Compiled(90, tokens=1, kv=FP8, batch=4),
    Compiled(90, tokens=8, batch=32, spill=24),
    Compiled(100),
    Compiled(120),
    Compiled(120, kv=FP8),
    Compiled(120, kind="gqa", dim=128, heads=8, kv_heads=8),
    Compiled(120, kind="gqa", tokens=1, dim=128, heads=8, kv_heads=8, batch=16),  # a draft step
    Compiled(90, kind="gqa", dim=128, heads=8, kv_heads=8),
)
ALL = (
    *(
        Compiled(90, tokens=t, kv=kv, batch=bs, spill=spill)
        for t, spills in ((1, (24, 0)), (3, (16, 128)), (8, (24, 128)))
        for kv, spill in zip((BF16, FP8), spills, strict=True)
        for bs in (1, 4, 64)
    ),
    *(Compiled(90, tokens=t, heads=h) for t in (1, 3) for h in (16, 64, 128)),
    *(
        Compiled(arch, tokens=t, mask=mask)
        for arch in (90, 100, 120)
        for t in (2, 4)
        for mask in ("qlen", "full")
    ),
    *(
        Compiled(arch, tokens=t, kv=kv, batch=bs)
        for arch in (100, 120)
        for t in (1, 3)
        for kv in (BF16, FP8)
        for bs in (1, 32)
    ),
    *(
        Compiled(arch, "gqa", 1, heads, 8, 128, BF16, bs)
        for arch in (90, 100, 120)
        for heads in (8, 64)
        for bs in (1, 16, 64)
    ),
    *(
        Compiled(arch, "gqa", 3, heads, 8, dim, kv, spill=16 if arch != 90 and kv == FP8 and dim > 128 else 0)
        for arch in (90, 100, 120)
        for dim in GQA_HEAD_DIMS
        for kv in (BF16, FP8)
        for heads in (8, 64)
    ),
)


def check(case: Compiled) -> tuple[SplitPlan, Resources, Resources]:
    """Compile both stages of ``case`` and hold them against the limits of its architecture."""
    plan = case.plan()
    split, merge = compile_plan(plan, case.arch)
    for name, stage in (("split", split), ("merge", merge)):
        assert stage.shared <= SHARED_LIMIT[case.arch], (name, stage.shared)
        assert stage.registers <= 255, (name, stage.registers)
    assert split.spill_bytes <= case.spill, split.spill_bytes
    assert merge.spill_bytes == 0, merge.spill_bytes
    if case.spill == 0:
        assert split.count("LDL") == 0 and split.count("STL") == 0
    assert any(split.count(name) for name in MATRIX[case.arch]), "no matrix instruction"
    assert "LDGSTS.E.BYPASS" in merge.sass and ".128" in merge.sass, "merge without 16-byte copies"
    if plan.tile.kernel == "hopper":
        assert "LDGSTS.E.BYPASS.128" in split.sass, "latent tiles without 16-byte copies"
        assert split.count("HMMA") == 0, "fell off the warpgroup path"
    return plan, split, merge


@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_resources(case: Compiled) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_resources_of_everything_the_table_can_choose(case: Compiled) -> None:
    check(case)


@pytest.mark.parametrize("name", ["traced", *CHANGES])
def test_resources_of_what_is_being_tried(name: str) -> None:
    plan, traced = Compiled(90).plan(), name == "traced"
    plan = plan if traced else CHANGES[name](plan)
    split, merge = compile_plan(plan, 90, CallForm(False, True, False, traced))
    assert split.spill_bytes == merge.spill_bytes == 0
    assert split.registers <= 168


def test_control_a_tile_too_large_for_sm_120_is_seen() -> None:
    """The Hopper tile, forced onto sm_120, must break the limit that the test is there for."""
    from dataclasses import replace

    plan = Compiled(120).plan()
    large = replace(plan, tile=replace(plan.tile, block_n=64, num_stages=2))
    with pytest.raises((AssertionError, triton.runtime.errors.OutOfResources)):
        split, _ = compile_plan(large, 120)
        assert split.shared <= SHARED_LIMIT[120]
