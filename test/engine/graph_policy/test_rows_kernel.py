"""The kernel that keeps rows against the plain functions, under Triton's interpreter in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


def check(trials: int = 12) -> None:
    """Odd widths around the block, strided hidden states, poison that must stay where it was."""
    from sglang.srt.speculative.auto import rows
    from sglang.srt.speculative.auto.rows_kernel import BLOCK

    generator = torch.Generator().manual_seed(0)
    for trial in range(trials):
        width = (1, 7, 129, BLOCK - 1, BLOCK, BLOCK + 3)[trial % 6]
        batch, span = 1 + trial % 5, 1 + trial % 7
        rings = [rows.RowRing(9, span, width, torch.float32, "cpu") for _ in range(2)]
        for ring in rings:
            ring.hidden.fill_(float("nan"))
            ring.tokens.fill_(-7)
        slots = torch.randperm(8, generator=generator)[:batch] + 1
        lengths = torch.randint(0, 1000, (batch,), generator=generator)
        hidden = torch.randn(batch, width + 5, generator=generator)[:, :width]
        tokens = torch.randint(0, 99, (batch,), generator=generator).to(torch.int32)
        rings[0].store(slots, lengths, hidden, tokens)
        rows._store_on_gpu(rings[1], slots, lengths, hidden, tokens)
        assert torch.equal(rings[0].tokens, rings[1].tokens)
        assert torch.equal(rings[0].hidden.nan_to_num(1e9), rings[1].hidden.nan_to_num(1e9))
        assert int((~rings[1].hidden.isnan()).sum()) == batch * width


def test_the_kernel_keeps_what_the_plain_functions_keep() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_the_kernel_compiles_ahead_of_time(arch: int) -> None:
    from sglang.srt.speculative.auto.rows_kernel import BLOCK, store_rows
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"hidden": "*bf16", "tokens": "*i64", "slots": "*i64", "positions": "*i64"}
    places = {"ring": "*bf16", "ring_tokens": "*i64", "stride": "i32", "width": "i32", "span": "i32"}
    types = pointers | places | {"BLOCK": "constexpr"}
    source = ASTSource(store_rows, types, constexprs={"BLOCK": BLOCK})
    kernel = compile_kernel(source, target=GPUTarget("cuda", arch, 32))
    assert kernel.metadata.shared <= 101_376 and kernel.asm["cubin"]


if __name__ == "__main__":
    check()
