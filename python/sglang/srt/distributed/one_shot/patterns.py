"""Values whose sums are exact in bf16, so that a check can ask for equality and a wrong byte cannot hide."""

from __future__ import annotations

import torch

#: The higher rank of a pair multiplies by this: a sum then shows both contributions, one in each four bits.
HIGH = 16


def part(
    rank: int, turn: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Integers 1 to 13 that differ by rank, turn and position. Never 0: memory nobody wrote often is."""
    rows, hidden = shape
    index = torch.arange(rows * hidden, device=device, dtype=torch.int64)
    # Odd multipliers, and a period that is prime: neighbouring ranks, turns, rows and columns all differ.
    values = (index * 7 + index // 251 * 5 + rank * 11 + turn * 3) % 13 + 1
    return values.view(rows, hidden).to(dtype)


def expected_sum(
    ranks: int, turn: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of every rank's part; at most 8 x 13 = 104, exact in bf16 and fp16."""
    total = torch.zeros(shape, dtype=torch.float32, device=device)
    for rank in range(ranks):
        total += part(rank, turn, shape, torch.float32, device)
    return total.to(dtype)


def rms_reference(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32."""
    wide = h.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
