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


def test_counts_equal_the_plain_functions() -> None:
    environment = dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    check()
