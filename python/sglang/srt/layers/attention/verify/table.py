"""Measured and compiled-for tile choices, by architecture. Data only: ``plan`` turns a row into a launch.

Rows of sm_90 were measured on one H200 (benchmark/results). Rows of sm_100 and sm_120 are chosen from
ahead-of-time compilation alone (shared memory, registers, spills); no such device has run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["fused", "warpgroup", "hopper", "triton", "plain"]
Fused = Literal["no", "measured", "always"]

# Architectures whose rows were measured; the others were chosen by ahead-of-time compilation alone.
MEASURED_FAMILIES = ("sm_90",)
# What a call with each kernel is, in words.
FORMS: dict[Kernel, str] = {
    "fused": "one launch (CUDA C++)",
    "warpgroup": "split and merge launches (CUDA C++)",
    "hopper": "split and merge launches (Triton, warp-specialised)",
    "triton": "split and merge launches (Triton)",
    "plain": "PyTorch",
}


@dataclass(frozen=True)
class Tile:
    """Shape of one program: ``block_n`` keys by ``block_r`` query rows, and how the compiler lays it out.

    ``max_registers`` (a thread, 0 for the compiler's choice) leaves room for merge blocks on the same SM. ``pace`` (two
    launches in CUDA C++): parts of 16 keys by 192 dims under way in the first stage, until the queries are there, and from
    then on.
    """

    kernel: Kernel
    block_n: int
    block_r: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    pace: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Splits:
    """Chunk sizes in keys (see ``schedule.chunk_keys``) and how many programs share one SM in one wave."""

    grain: int
    min_keys: int
    per_sm: int


@dataclass(frozen=True)
class Merge:
    """Tile of the merge: ``rounds`` blocks of ``block_s`` splits at once, by ``block_d`` value dims."""

    block_s: int
    rounds: int
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


def _hopper_tile(rows: int, kv_bytes: int) -> Tile:
    """Four consumer warps up to 32 rows; 64 rows need eight for their accumulators."""
    block_r = _row_block(rows, 64)
    if kv_bytes == 1:
        return Tile("hopper", 64, block_r, 4 if block_r <= 32 else 8, 2)
    if block_r == 64:
        return Tile("hopper", 64, block_r, 8, 2)
    return Tile("hopper", 64, block_r, 4, 2, 128 if block_r == 16 else 168)


FUSED_ROWS = 32
# The batch from which one launch pays where the two in CUDA C++ do not serve, by bytes of a cached value.
FUSED_FROM = {2: 24, 1: 4}
FUSED_VARIABLE = "SGLANG_FORK_FUSED_ATTENTION"
# Batches above it have too few blocks a request for the one-launch kernel to gain anything.
FUSED_BATCH = 64


def fused_pays(batch: int, rows: int, kv_bytes: int) -> bool:
    """Is one launch faster than two in Triton? Measured on one H200 from 1k to 128k keys at batch 1, 4, 8 and 32.

    Caches of two bytes: many requests with several rows, where the merge in Triton reads everything once more. One launch
    gains 10 to 12 us up to 4k keys and loses up to 13% from 16k on, where so many requests seldom fit the memory; a plan does not
    know lengths. Two launches in CUDA C++ are faster than both in every figure of a loop. Caches of one byte: up to
    40% at short contexts and never more than 1% slower, since e4m3 becomes fp16 on the way to the product and not
    through shared memory.
    """
    return batch >= FUSED_FROM.get(kv_bytes, FUSED_BATCH + 1) and (rows > 8 or kv_bytes == 1)


def fused_use(family: str, setting: str) -> Fused:
    """Where the one-launch kernel is wanted on an architecture, for a value of ``SGLANG_FORK_FUSED_ATTENTION``."""
    if setting == "on":
        return "always"
    return "measured" if setting != "off" and family in MEASURED_FAMILIES else "no"


# Up to 32 rows: one warpgroup holds their results. Larger batches were not measured.
WARPGROUP_ROWS, WARPGROUP_BATCH = 32, 64
WARPGROUP_VARIABLE = "SGLANG_FORK_WARPGROUP_ATTENTION"


def warpgroup_use(capability: tuple[int, int], setting: str) -> Fused:
    """Where the two launches in CUDA C++ are wanted, for a value of ``SGLANG_FORK_WARPGROUP_ATTENTION``.

    Their products are an instruction that only capability 9.0 has.
    """
    if setting == "off" or capability != (9, 0):
        return "no"
    return "always" if setting == "on" else "measured"


def warpgroup_pays(batch: int) -> bool:
    """Are they the fastest form? In a loop, in all figures of one H200 from 1k to 128k keys at batch 1, 4, 8 and 32."""
    return batch <= WARPGROUP_BATCH


# Parts of 16 keys by 192 dims under way in the first stage, before the queries are there, and from then on.
PACE = (3, 4, 8)


def warpgroup_tile(rows: int) -> Tile:
    """Tile of the two launches in CUDA C++: 64 keys by whole groups of eight rows, a ring of five half tiles."""
    return Tile("warpgroup", 64, -(-rows // 8) * 8, 8, 5, pace=PACE)


# A work list a forward pass costs a launch, and each layer then starts by less than a microsecond sooner.
LISTED_LAYERS = 4


def listing_pays(layers: int) -> bool:
    """Does a model of so many layers gain from a work list for all of them?"""
    return layers >= LISTED_LAYERS


def fused_tile(rows: int, stages: int) -> Tile:
    """Tile of the one-launch kernel: 32 keys by whole groups of eight rows."""
    return Tile("fused", 32, -(-rows // 8) * 8, 8, stages)


def choose_tile(family: str, kind: str, rows: int, dim: int, kv_bytes: int, plain_mask: bool) -> Tile:
    """Tile for ``rows`` query rows over keys of ``dim`` main dims of ``kv_bytes`` bytes each.

    ``plain_mask`` is False when a tree mask is in play, which only the Triton kernel reads.
    """
    if family == "interpreter":
        return Tile("triton", 16, _row_block(rows, 32), 4, 1)
    if kind == "mla":
        if family == "sm_90":
            if plain_mask and kv_bytes <= 2:
                return _hopper_tile(rows, kv_bytes)
            return Tile("triton", 64, _row_block(rows, 32), 8, 2)
        # 64 keys need 110,600 bytes on sm_100 and spill; on sm_120 they pass its 101,376 bytes.
        return Tile("triton", 32, _row_block(rows, 32), 8, 1)
    if family in ("sm_90", "sm_100"):
        if dim <= 128:
            return Tile("triton", 64, _row_block(rows, 32), 4, 3)
        return Tile("triton", 64, _row_block(rows, 32), 8 if kv_bytes == 1 else 4, 2)
    return Tile("triton", 32, _row_block(rows, 32), 4, 2 if dim <= 128 else 1)


def choose_splits(family: str, kind: str) -> Splits:
    """How finely to cut the keys. One tile a split was best or equal from 1k to 4k keys; beyond, one wave.

    Cut to the key, all 132 multiprocessors of an H200 pull at 64k keys; cut to 16 keys, 128 and one of three keys.
    """
    if family == "interpreter":
        return Splits(grain=16, min_keys=16, per_sm=1)
    if kind == "mla":
        return Splits(grain=1 if family == "sm_90" else 16, min_keys=64, per_sm=1)
    return Splits(grain=16, min_keys=64, per_sm=2)


def choose_merge(family: str, items: int, rows: int, dim: int) -> Merge:
    """Merge tile for ``rows`` output rows of ``dim`` dims when a request may have up to ``items`` splits.

    Few rows want many programs of one warp (no barrier in them, nothing to wait for), many rows fewer, larger
    ones. Shared memory stays near 16 and 32 KiB.
    """
    if family == "interpreter":
        return Merge(8, 1, 512, 1)
    if rows <= 64:
        block_s, block_d, warps = 32, 32, 1
    else:
        block_d = 64
        while block_d < min(dim, 512) and rows * (dim // block_d) > 768:
            block_d *= 2
        block_s, warps = max(4, 2048 // block_d), 4
    rounds = 1
    while rounds * block_s < items and rounds < 8:
        rounds *= 2
    return Merge(block_s, rounds, block_d, warps)
