"""The draw without a sort compiled ahead of time: its vectors stay in registers, and it needs little shared memory."""

from __future__ import annotations

from typing import Any

import aot
import pytest
import triton
from sglang.srt.speculative.cycle_graph import draw_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LOGITS = {"logits": "*fp32", "stride": "i32", "columns": "i32"}
ASKED = {"temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32"}
PEAKS, FOUND, BINS = {"peaks": "*fp32"}, {"found": "*i64"}, {"bins": "*i64"}
SIZES: dict[str, Any] = {
    "WIDTH": 3, "CHUNKS": 80, "LANES": 128, "COLS": draw_kernel.COLUMNS, "SLICE": draw_kernel.SLICE, "LEVEL": 2, "COUNTER": 3,
    **{name: getattr(draw_kernel, name) for name in ("BINS", "DIGIT", "LEVELS", "SCALE", "COUNT_AT", "FOUND", "TOTAL_AT", "LOW_AT")},
}  # fmt: skip
# Arguments of each kernel in their order, then the constants it takes.
KERNELS: dict[str, dict[str, str]] = {
    "peaks_kernel": LOGITS | PEAKS | {"firsts": "*i32"} | FOUND,
    "level_kernel": LOGITS | ASKED | PEAKS | FOUND | {"bins_before": "*i64"} | BINS,
    "narrow_kernel": {"columns": "i32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32"} | PEAKS | FOUND | BINS,
    "shares_kernel": LOGITS | ASKED | PEAKS | FOUND | {"shares": "*i64"},
    "token_kernel": {"state": "*i32"} | LOGITS | ASKED | PEAKS | {"firsts": "*i32"} | FOUND | {"shares": "*i64"}
    | {"maxima": "*fp32", "indices": "*i32", "scratch_stride": "i32"},
}  # fmt: skip


@pytest.mark.parametrize("arch", (90, 100, 120))
@pytest.mark.parametrize("logits", ("*fp32", "*bf16"))
@pytest.mark.parametrize("name", KERNELS)
def test_keeps_to_registers(name: str, logits: str, arch: int) -> None:
    kernel = getattr(draw_kernel, name)
    arguments = KERNELS[name] | ({"logits": logits} if "logits" in KERNELS[name] else {})
    constants = {key: SIZES[key] for key in kernel.arg_names if key not in arguments}
    types = arguments | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(arguments) if key != "scratch_stride"}
    source = ASTSource(kernel, types, constants, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": draw_kernel.WARPS}
    )
    found = aot.resources(compiled.asm["cubin"], compiled.metadata.shared)
    assert found.spill_bytes == 0
    # Two blocks and more fit a multiprocessor.
    assert found.registers <= 168
    assert found.shared <= 16384
