"""The draw without a sort compiled ahead of time: it keeps its weights in registers, and needs hardly any shared memory."""

from __future__ import annotations

import aot
import pytest
import triton
from sglang.srt.speculative.cycle_graph import draw_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "state": "*i32", "logits": "*fp32", "stride": "i32", "columns": "i32", "temperatures": "*fp32", "top_ks": "*i32",
    "top_ps": "*fp32", "min_ps": "*fp32", "maxima": "*fp32", "indices": "*i32", "scratch_stride": "i32",
}  # fmt: skip


@pytest.mark.parametrize("arch", (90, 100, 120))
@pytest.mark.parametrize("logits", ("*fp32", "*bf16"))
def test_keeps_to_registers(arch: int, logits: str) -> None:
    constants = {"WIDTH": 3, "COUNTER": 3, "COLS": draw_kernel.COLUMNS}
    types = TYPES | {"logits": logits} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(TYPES) if name != "scratch_stride"}
    source = ASTSource(draw_kernel.draw_kernel, types, constants, aligned)
    options = {"num_warps": draw_kernel.WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    found = aot.resources(compiled.asm["cubin"], compiled.metadata.shared)
    # Some words of a stack frame for the scalars between two passes; no vector of weights fits into that.
    assert found.spill_bytes <= 64
    # 512 threads of at most 128 registers fit a multiprocessor.
    assert found.registers <= 128
    assert found.shared <= 4096
