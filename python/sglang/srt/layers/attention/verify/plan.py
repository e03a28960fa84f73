"""How to run an admitted call: tile, warps, stages and the number of KV splits, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.attention.verify.admission import AttentionRequest


@dataclass(frozen=True)
class DeviceTraits:
    """What a plan depends on about the device: ``capability`` (0, 0) means Triton's interpreter."""

    capability: tuple[int, int]
    sm_count: int


@dataclass(frozen=True)
class SplitPlan:
    """One launch configuration; hashable, valid for every length up to the request table's width.

    ``max_splits`` is the split dimension of the (fixed) grid; the number used is decided on the device as
    min(max_splits, ceil(length / (block_n * min_tiles))). ``use`` says whether policy prefers this path over
    the stock kernel; ``reason`` explains tile, splits and ``use`` in one line.
    """

    request: AttentionRequest
    max_splits: int
    min_tiles: int
    block_n: int
    block_r: int
    row_blocks: int
    num_warps: int
    num_stages: int
    use: bool
    reason: str


def make_plan(request: AttentionRequest, device: DeviceTraits, max_context: int) -> SplitPlan:
    """Plan for ``request`` on ``device``; ``max_context`` bounds the length (tokens) of any request."""
    block_n, block_r = 64, 32
    row_blocks = -(-request.rows // block_r)
    programs = request.batch * row_blocks * request.kv_heads
    tiles = -(-max_context // block_n)
    max_splits = max(1, min(tiles, -(-device.sm_count // programs)))
    return SplitPlan(request, max_splits, 1, block_n, block_r, row_blocks, 4, 2, True, "placeholder table")
