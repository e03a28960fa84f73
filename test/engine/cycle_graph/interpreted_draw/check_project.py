"""The projection's kernel against float64 under Triton's interpreter; ``test_kernels.py`` runs it."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative.cycle_graph.ahead import kernel

# Rows, columns, depth, programs: tails in every direction, more programs than tiles, one program for all.
CASES = ((1, 7, 13, 3), (3, 37, 517, 5), (2, 4, 2048, 64), (4, 131, 1031, 1), (3, 8, 4099, 2))


def tensors(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    x = torch.full((rows, depth + 5), float("nan"), dtype=dtype)
    weight = torch.full((columns, depth + 3), float("nan"), dtype=dtype)
    x[:, :depth] = torch.randn(rows, depth, generator=generator).to(dtype)
    weight[:, :depth] = torch.randn(columns, depth, generator=generator).to(dtype)
    return x[:, :depth], weight[:, :depth], torch.randn(columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize(("rows", "columns", "depth", "programs"), CASES)
def test_equals_float64_within_rounding(
    rows: int, columns: int, depth: int, programs: int, biased: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = tensors(rows, columns, depth, dtype)
    memory = torch.full((rows + 1, columns + 2), -7.0, dtype=dtype)
    kernel.project_rows(x, weight, bias if biased else None, memory[:rows, :columns], programs)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    error = (memory[:rows, :columns].double() - exact).abs()
    # Rounding of the result, and of a sum of ``depth`` products in float32.
    size = (x.double().abs() @ weight.double().abs().T) * depth**0.5 * 2.0**-23
    assert (error <= exact.abs() * torch.finfo(dtype).eps + size + 1e-6).all()
    assert (memory[rows:] == -7).all() and (memory[:, columns:] == -7).all()


def test_control_a_lost_column_is_seen() -> None:
    x, weight, _ = tensors(3, 37, 517, torch.float32)
    out = torch.full((3, 37), float("nan"))
    kernel.project_rows_kernel[(1,)](
        x, weight, weight, out, 36, 517, x.stride(0), weight.stride(0), 37,
        PROGRAMS=1, ROWS=3, COLUMNS=kernel.COLUMNS, DEPTH=kernel.DEPTH, UNROLL=kernel.UNROLL, HAS_BIAS=False,
    )  # fmt: skip
    assert torch.isnan(out[:, 36]).all() and not torch.isnan(out[:, :36]).any()


@pytest.mark.parametrize("bad", ((5, 8), (0, 8)))
def test_rows_that_do_not_fit_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rows"):
        kernel.project_rows(torch.zeros(bad), torch.zeros(4, 8), None, torch.zeros(bad[0], 4), 1)
