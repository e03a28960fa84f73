"""The projection's kernel compiled ahead of time: it must leave its multiprocessor to others."""

from __future__ import annotations

import aot
import pytest
import triton
from sglang.srt.speculative.cycle_graph.ahead import kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = ("x", "weight", "bias", "out")
NUMBERS = ("columns", "depth", "x_stride", "weight_stride", "out_stride")


def build(arch: int, rows: int) -> aot.Resources:
    constants = {
        "PROGRAMS": 64, "ROWS": rows, "COLUMNS": kernel.COLUMNS, "DEPTH": kernel.DEPTH, "UNROLL": kernel.UNROLL,
        "HAS_BIAS": False,
    }  # fmt: skip
    types = (
        dict.fromkeys(POINTERS, "*bf16")
        | dict.fromkeys(NUMBERS, "i32")
        | dict.fromkeys(constants, "constexpr")
    )
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(POINTERS) + len(NUMBERS))}
    source = ASTSource(kernel.project_rows_kernel, types, constants, aligned)
    options = {"num_warps": kernel.WARPS, "num_stages": 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return aot.resources(compiled.asm["cubin"], compiled.metadata.shared)


@pytest.mark.parametrize("arch", (90, 100, 120))
@pytest.mark.parametrize("rows", (1, 3, 4))
def test_takes_registers_only(arch: int, rows: int) -> None:
    found = build(arch, rows)
    # A sum across lanes may take a word a warp; a kernel beside it may take 227 KiB of 228.
    assert found.shared <= 64
    assert found.spill_bytes == 0
    # 128 threads of 168: a third of a multiprocessor's registers, the rest is others'.
    assert found.registers <= 168
    # Whole vectors only: one load of the weight and one of each row a step.
    assert found.count("LDG") == kernel.UNROLL * (1 + rows)
