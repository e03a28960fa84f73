"""The prefetch compiled ahead of time: one instruction for a chunk, and nothing that takes room from a kernel beside it."""

from __future__ import annotations

import aot
import pytest
import triton
from sglang.srt.speculative.cycle_graph.prefetch import kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@pytest.mark.parametrize("arch", (90, 100, 120))
def test_asks_and_ends(arch: int) -> None:
    constants = {"CHUNK": kernel.CHUNK, "LANES": kernel.LANES}
    types = {"memory": "*u8", "total": "i32"} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", kernel.UNIT]] for i in range(2)}
    source = ASTSource(kernel.prefetch_kernel, types, constants, aligned)
    options = {"num_warps": 1, "num_stages": 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    found = aot.resources(compiled.asm["cubin"], compiled.metadata.shared)
    assert found.count("UBLKPF") == 1
    # No load: nothing waits for the memory that is asked for, and no store can change a value.
    assert not any(found.count(name) for name in ("LDG", "STG", "LDS", "STS", "BAR", "ATOMG", "RED"))
    assert found.shared == 0 and found.spill_bytes == 0 and found.registers <= 32
