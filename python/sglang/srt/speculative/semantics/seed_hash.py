"""The hash behind seeded sampling, for tensors on a CPU.

Upstream derives the noise of a seeded draw from MurmurHash3 (32 bit) over seed, position and column, in a
Triton kernel that needs a GPU. This is the same published function in tensor arithmetic: a seed gives the
same noise on every device.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_BLOCK_1, _BLOCK_2 = 0xCC9E2D51, 0x1B873593
_MULTIPLY, _ADD = 5, 0xE6546B64
_FINAL_1, _FINAL_2 = 0x85EBCA6B, 0xC2B2AE35


def murmur3(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of the four 32-bit words seed (low, high), position, column.

    Args:
        seeds: 64-bit integers ``[R]``.
        positions: integers ``[R]``, taken modulo 2**32.
        columns: integers ``[C]``, taken modulo 2**32.

    Returns:
        int64 ``[R, C]`` in ``[0, 2**32)``.
    """
    seed = seeds.view(torch.int64) if seeds.dtype == torch.uint64 else seeds.long()
    state = torch.zeros_like(seed)
    for word in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        state = _absorb(state, word)
    state = _absorb(state.unsqueeze(1), columns.to(torch.int64).unsqueeze(0) & _MASK)
    state = state ^ 16  # length of the input in bytes
    state = _times(state ^ (state >> 16), _FINAL_1)
    state = _times(state ^ (state >> 13), _FINAL_2)
    return state ^ (state >> 16)


def _absorb(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    mixed = _times(_rotate(_times(word, _BLOCK_1), 15), _BLOCK_2)
    return (_rotate(state ^ mixed, 13) * _MULTIPLY + _ADD) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Product modulo 2**32 of numbers below 2**32, in halves so that int64 does not overflow."""
    low, high = factor & 0xFFFF, factor >> 16
    return (value * low + (((value * high) & 0xFFFF) << 16)) & _MASK
