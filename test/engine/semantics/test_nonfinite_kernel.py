"""The kernel that counts good tokens against the plain functions, under Triton's interpreter in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

VALUES = (float("nan"), float("inf"), float("-inf"))


def check(trials: int = 40) -> None:
    """Random rows, some of them bad in each way; random accepted lengths, odd widths and batch sizes."""
    from sglang.srt.speculative.semantics.nonfinite import bad_rows, good_tokens
    from sglang.srt.speculative.semantics.nonfinite_kernel import good_tokens_from_maxima

    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    shortened = 0
    for _ in range(trials):
        batch, depth = draw(1, 6), draw(1, 6)
        logits = torch.randn(batch * depth, 7, generator=generator)
        for row in range(batch * depth):
            kind = draw(0, 9)
            if kind < 2:
                logits[row, draw(0, 7)] = VALUES[kind]
            elif kind == 2:
                logits[row] = VALUES[2]
            elif kind == 3:
                logits[row, 1:] = VALUES[2]  # a mask that leaves one token is no fault
        accepted = torch.full((batch, depth), -1, dtype=torch.int32)
        for request in range(batch):
            kept = draw(1, depth + 1)
            accepted[request, :kept] = torch.arange(request * depth, request * depth + kept)
        expected = good_tokens(bad_rows(logits), accepted)
        got = good_tokens_from_maxima(logits.amax(-1), accepted)
        assert torch.equal(got, expected), (got, expected)
        shortened += int((expected < (accepted >= 0).sum(-1)).sum())
    assert shortened > trials // 4


def check_levels(trials: int = 40) -> None:
    """Zeros in bad rows only, nothing beside the row, and a row that a mask leaves one token stays."""
    from sglang.srt.speculative.semantics.nonfinite import bad_rows, is_bad
    from sglang.srt.speculative.semantics.nonfinite_kernel import level_bad_rows

    generator = torch.Generator().manual_seed(1)
    seen = 0
    for trial in range(trials):
        rows, columns = 1 + trial % 5, (7, 1009, 1024, 2501)[trial % 4]
        # A view of wider memory: what lies behind a row must stay.
        wide = torch.randn(rows, columns + 3, generator=generator)
        logits = wide[:, :columns]
        bad_row = trial % rows
        if trial % 3:
            logits[bad_row, trial % columns] = VALUES[trial % 3 - 1]
        elif trial % 2:
            logits[bad_row] = VALUES[2]
        else:
            logits[bad_row, 1:] = VALUES[2]
        expected, before = bad_rows(logits), wide.clone()
        maxima = logits.amax(-1)
        level_bad_rows(maxima, logits)
        assert [is_bad(maximum) for maximum in maxima.tolist()] == expected.tolist()
        before[:, :columns].masked_fill_(expected.unsqueeze(-1), 0.0)
        assert torch.equal(wide, before)
        seen += int(expected.sum())
    assert seen > trials // 3


def test_counts_equal_the_plain_functions() -> None:
    environment = dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_compile_for_every_architecture(arch: int, dtype: str) -> None:
    import triton
    from sglang.srt.speculative.semantics import nonfinite_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    row_max = {"row_max": f"*{dtype}"}
    level = row_max | {"logits": f"*{dtype}", "stride": "i32", "columns": "i32", "BLOCK": "constexpr"}
    counts = row_max | {"accept_index": "*i32", "good": "*i32", "depth": "i32", "WIDTH": "constexpr"}
    for kernel, signature, constants in (
        (nonfinite_kernel._level_rows_kernel, level, {"BLOCK": 1024}),
        (nonfinite_kernel._good_tokens_kernel, counts, {"WIDTH": 4}),
    ):
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", arch, 32)).metadata.shared <= 101_376


if __name__ == "__main__":
    check()
    check_levels()
