"""Every variant of ``warpgroup.cu`` compiled ahead of time: shared memory, registers, spills, instructions. No device needed."""

from __future__ import annotations

import re

import checks
import pytest
from aot import Resources, resources
from sglang.srt.layers.attention.verify import fused_build
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant, compile_source, machine_code

ARCH, LIMIT = "sm_90a", fused_build.SHARED_LIMIT[(9, 0)]
# Of a multiprocessor; each block takes a KiB of shared memory beside what it asks for.
SHARED, REGISTERS, EXTRA = 228 * 1024, 65_536, 1024
# Moves out of ordinary registers, as addresses of matrix operands need it; one each made the kernel 15% slower. Nine are there,
# and eleven more for time stamps.
MOVES, TRACED_MOVES = 20, 32
VARIANTS = (
    *(
        WarpgroupVariant(tiles, half, traced, listed)
        for tiles in (1, 2, 3, 4)
        for half in (False, True)
        for traced in (False, True)
        for listed in (False, True)
    ),
    WarpgroupVariant(3, False, listed=True, pace=(12, 12, 12), stages=4),  # of the bench
)
# A lane's last copy of a stage's first rows: both addresses are one register and a constant, as of the eight before it.
LAST_COPY = r"LDGSTS\.E\.BYPASS\.128 \[R\d+\+0x{:x}\], desc\[\w+\]\[R\d+\.64\+0x400\]"
# Six parts of a stage wait for others to land, by each of the paces.
PARTS = 6


def entries(variant: WarpgroupVariant, code: bytes) -> tuple[Resources, Resources]:
    """What split and merge ask for."""
    return (
        resources(code, variant.shared_bytes(), "verify_split"),
        resources(code, variant.merge_bytes(), "verify_merge"),
    )


def registers_of(found: Resources, threads: int) -> int:
    """Registers that a block takes: a warp's come in units of 256."""
    return threads // 32 * (-(-found.registers * 32 // 256) * 256)


def check_split(variant: WarpgroupVariant, split: Resources) -> None:
    """Limits of the split and the instructions it must be made of."""
    assert split.shared <= LIMIT
    assert split.registers <= (208 if variant.row_tiles == 4 else 168)
    assert split.spill_bytes == 0
    shape = f"HGMMA.64x{8 * variant.row_tiles}x16.F32"
    # 36 steps of the first product, 32 of the second.
    assert split.sass.count(shape) == 36 + 32
    assert (f"{shape}.BF16" in split.sass) != variant.half
    assert split.count("R2UR") <= (TRACED_MOVES if variant.traced else MOVES)
    assert re.search(LAST_COPY.format(8 * variant.stages * fused_build.STAGE_KEYS * 128), split.sass)
    for parts in variant.pace:
        assert len(re.findall(rf"DEPBAR\.LE SB\d, {parts - 1:#x}\b", split.sass)) >= PARTS


def check_list(code: bytes) -> None:
    """Limits of the work list: it must start beside whatever runs."""
    found = resources(code, 0, "verify_list")
    assert found.registers <= 40 and found.spill_bytes == 0


def check_merge(merge: Resources) -> None:
    """Limits of the merge, and loads of 16 bytes."""
    assert merge.registers <= 88 and merge.spill_bytes == 0
    assert "LDG.E.128" in merge.sass and not merge.count("HGMMA")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, id=str(v), marks=[pytest.mark.slow] * (v.traced or v.stages != 5)) for v in VARIANTS],
)
def test_resources(variant: WarpgroupVariant) -> None:
    code = machine_code(variant, ARCH)
    split, merge = entries(variant, code)
    if variant.listed:
        check_list(code)
    check_split(variant, split)
    check_merge(merge)
    together = split.shared + merge.shared + 2 * EXTRA
    registers = registers_of(split, fused_build.WARPGROUP_THREADS) + registers_of(
        merge, fused_build.WARPGROUP_MERGE_THREADS
    )
    # A block of the merge waits beside one of the split.
    fits = together <= SHARED and registers <= REGISTERS
    assert fits or variant.row_tiles == 4, (together, registers)


# What is written in place of what, and must not pass.
BREAKS = (
    (
        "an address that the compiler knows",
        "  forget(a);\n  return __shfl_sync(~0u, a, 0);",
        "  return a + (threadIdx.x >> 8);",
    ),
    ("an address for each copy", "row + i * 128, there", "row + i * p.header_width, there"),
    ("copies that wait for no others", "else parts_under_way<PACE - 1>();", "else;"),
    ("registers for half as many", "NT > 3 ? 208 : 168", "NT > 3 ? 208 : 96"),
)


@pytest.mark.parametrize(("old", "new"), [b[1:] for b in BREAKS], ids=[b[0] for b in BREAKS])
def test_control_a_worse_kernel_is_noticed(old: str, new: str) -> None:
    variant = WarpgroupVariant(3, False)
    source, *headers = ({p.name: p.read_text(encoding="utf-8") for p in variant.files}).items()
    texts = dict(headers)
    assert sum(text.count(old) for text in texts.values()) == 1
    texts = {name: text.replace(old, new) for name, text in texts.items()}
    split, _ = entries(variant, compile_source(source[1], variant.options(ARCH), texts))
    checks.must_fail(lambda: check_split(variant, split))
