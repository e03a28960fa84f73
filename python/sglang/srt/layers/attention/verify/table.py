"""Measured and compiled-for tile choices, by architecture. Data only: ``plan`` turns a row into a launch.

Rows of sm_90 were measured on one H200 (benchmark/results). Rows of sm_100 and sm_120 are chosen from
ahead-of-time compilation alone (shared memory, registers, spills); no such device has run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["hopper", "triton", "plain"]


@dataclass(frozen=True)
class Tile:
    """Shape of one program: ``block_n`` keys by ``block_r`` query rows, and how the compiler lays it out."""

    kernel: Kernel
    block_n: int
    block_r: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Splits:
    """Chunk sizes in keys (see ``schedule.chunk_keys``) and how many programs share one SM in one wave."""

    grain: int
    min_keys: int
    short_keys: int
    short_min: int
    per_sm: int


@dataclass(frozen=True)
class Merge:
    """Tile of the merge: ``block_s`` splits by ``block_d`` value dims."""

    block_s: int
    block_d: int
    num_warps: int


def _row_block(rows: int, largest: int) -> int:
    """Smallest power of two from 16 that holds ``rows``, at most ``largest``."""
    block = 16
    while block < rows and block < largest:
        block *= 2
    return block


def arch_family(capability: tuple[int, int]) -> str:
    """Row group of the table; an architecture newer than any here uses "generic"."""
    return {
        (0, 0): "interpreter",
        (9, 0): "sm_90",
        (10, 0): "sm_100",
        (10, 3): "sm_100",
        (12, 0): "sm_120",
        (12, 1): "sm_120",
    }.get(capability, "generic")


def choose_tile(family: str, kind: str, rows: int, dim: int, kv_bytes: int, plain_mask: bool) -> Tile:
    """Tile for ``rows`` query rows over keys of ``dim`` main dims of ``kv_bytes`` bytes each.

    ``plain_mask`` is False when a tree mask is in play, which only the Triton kernel reads.
    """
    if family == "interpreter":
        return Tile("triton", 16, _row_block(rows, 32), 4, 1)
    if kind == "mla":
        if family == "sm_90":
            if plain_mask and kv_bytes <= 2:
                return Tile("hopper", 64, _row_block(rows, 64), 8, 3 if kv_bytes == 1 and rows <= 32 else 2)
            return Tile("triton", 64, _row_block(rows, 32), 8, 2)
        if family == "sm_100":
            return Tile("triton", 64, _row_block(rows, 32), 8, 2)
        return Tile("triton", 32, _row_block(rows, 16), 8, 1)
    if family in ("sm_90", "sm_100"):
        return Tile("triton", 64, _row_block(rows, 32), 4, 3 if dim <= 128 else 2)
    return Tile("triton", 32, _row_block(rows, 16), 4, 2 if dim <= 128 else 1)


def choose_splits(family: str, kind: str) -> Splits:
    """How finely to cut the keys."""
    if family == "interpreter":
        return Splits(grain=16, min_keys=32, short_keys=64, short_min=16, per_sm=1)
    if kind == "mla":
        return Splits(grain=16, min_keys=64, short_keys=2048, short_min=32, per_sm=1)
    return Splits(grain=16, min_keys=128, short_keys=2048, short_min=64, per_sm=2)


def choose_merge(family: str, items: int) -> Merge:
    """Merge tile when one request may have up to ``items`` splits: one round for up to 256 of them."""
    if family == "interpreter":
        return Merge(8, 512, 1)
    block_s = 32
    while block_s < min(items, 256):
        block_s *= 2
    return Merge(block_s, 32, 4)
