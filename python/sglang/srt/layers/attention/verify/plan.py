"""How to run an admitted call: tile, warps, stages and KV splits, with the reason in words.

A plan depends on nothing that changes between replays of a captured graph. Lengths act on the device
(``schedule``): the plan only bounds how many work items they can produce.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from sglang.srt.layers.attention.verify.admission import AttentionRequest
from sglang.srt.layers.attention.verify.fused_build import Variant, deepest
from sglang.srt.layers.attention.verify.table import (
    FORMS,
    FUSED_BATCH,
    FUSED_ROWS,
    FUSED_VARIABLE,
    MEASURED_FAMILIES,
    WARPGROUP_ROWS,
    WARPGROUP_VARIABLE,
    Fused,
    Merge,
    Splits,
    Tile,
    arch_family,
    choose_merge,
    choose_splits,
    choose_tile,
    fused_pays,
    fused_tile,
    fused_use,
    warpgroup_pays,
    warpgroup_tile,
    warpgroup_use,
)
from sglang.srt.verify_settings import read_text


@dataclass(frozen=True)
class DeviceTraits:
    """What a plan depends on about the device: ``capability`` (0, 0) is a CPU.

    ``fused`` says whether the one-launch kernel can be built there, and if it is used wherever it is right or only
    where it was measured to be faster; ``warpgroup`` the same of the two launches in CUDA C++.
    """

    capability: tuple[int, int]
    sm_count: int
    fused: Fused = "no"
    warpgroup: Fused = "no"


@dataclass(frozen=True)
class SplitPlan:
    """One launch configuration; hashable, valid for every length.

    ``target`` is the number of chunks the device code aims for, ``items`` the most work items it can produce
    (split dimension of the grid and of the workspace). ``use`` says whether policy prefers this path over the
    stock kernel; ``reason`` explains tile, splits and ``use`` in one line. ``early_split`` and ``early_merge``
    launch the stages with programmatic dependence on the kernel before them.
    """

    request: AttentionRequest
    tile: Tile
    splits: Splits
    merge: Merge
    target: int
    items: int
    row_blocks: int
    partial_dtype: torch.dtype
    early_merge: bool
    early_split: bool
    use: bool
    reason: str

    @property
    def form(self) -> str:
        """Which kernel a call of this plan runs and in how many launches, in words; the stock one where not ``use``."""
        return FORMS[self.tile.kernel] if self.use else "stock kernel"


def device_traits(device_index: int = 0) -> DeviceTraits:
    """Traits of a CUDA device, or of the CPU when there is none."""
    if not torch.cuda.is_available():
        return DeviceTraits((0, 0), 4)
    return traits_of(device_index)


def traits_of(device_index: int) -> DeviceTraits:
    """Traits of a CUDA device; builds the kernels in CUDA C++ that its settings want."""
    from sglang.srt.layers.attention.verify.fused_driver import available, warpgroup_available

    properties = torch.cuda.get_device_properties(device_index)
    capability = (properties.major, properties.minor)
    planned = planned_traits(
        capability,
        properties.multi_processor_count,
        read_text(FUSED_VARIABLE) or "auto",
        read_text(WARPGROUP_VARIABLE) or "auto",
    )
    if planned.fused != "no" and not available(device_index):
        planned = replace(planned, fused="no")
    if planned.warpgroup != "no" and not warpgroup_available(device_index):
        planned = replace(planned, warpgroup="no")
    return planned


def planned_traits(
    capability: tuple[int, int], sm_count: int, fused: str, warpgroup: str = "auto"
) -> DeviceTraits:
    """Traits of a device that is not at hand, as ``traits_of`` has them where both kernels build.

    ``fused`` and ``warpgroup`` are the values of ``SGLANG_FORK_FUSED_ATTENTION`` and ``SGLANG_FORK_WARPGROUP_ATTENTION`` there.
    """
    return DeviceTraits(
        capability,
        sm_count,
        fused_use(arch_family(capability), fused),
        warpgroup_use(capability, warpgroup),
    )


# Splits of the stock GQA decode kernel (upstream's default), and how many of its programs keep one SM busy.
STOCK_SPLITS, STOCK_PROGRAMS_PER_SM = 8, 4


def prefer(request: AttentionRequest, family: str, sm_count: int) -> tuple[bool, str]:
    """Is the split-KV path expected to be faster than the stock one? Says nothing about correctness."""
    if request.tokens > 1:
        return True, "verify would otherwise walk the prefix serially"
    if family == "interpreter":
        return True, "interpreter"
    if request.draft_step:
        # The stock kernel's metadata is made outside its graph, so with it the cycle would be three graphs: about a millisecond
        # of the host, where the kernels of this one layer differ by microseconds.
        return True, "a draft step, which keeps the cycle one graph"
    if family not in MEASURED_FAMILIES:
        return False, f"decode not measured on {family}"
    if request.kind == "mla":
        return True, "decode with latent cache, faster at every measured length"
    programs = request.batch * request.kv_heads * STOCK_SPLITS
    if programs <= STOCK_PROGRAMS_PER_SM * sm_count:
        return True, f"the stock decode kernel's {programs} programs leave the device idle"
    return False, "stock decode kernel already splits the keys"


def partial_dtype(request: AttentionRequest, tile: Tile) -> torch.dtype:
    """Element type of partial results: two bytes where the stage-one kernel turns them into whole lines.

    bf16 keeps the range of a bf16 cache; an fp8 cache, taken without its scale, fits fp16 and keeps its digits.
    """
    if tile.kernel not in ("hopper", "warpgroup"):
        return torch.float32
    return torch.float16 if request.kv_dtype.itemsize == 1 else request.q_dtype


def fused_variant(request: AttentionRequest, device: DeviceTraits) -> Variant | None:
    """The variant of the one-launch kernel that is right for ``request`` on ``device``, and wanted there, if there is one."""
    r = request
    pays = fused_pays(r.batch, r.rows, r.kv_dtype.itemsize) and not takes_warpgroup(r, device)
    if device.fused == "no" or (device.fused == "measured" and not pays):
        return None
    if r.kind != "mla" or r.mask != "none" or r.q_dtype.itemsize != 2:
        return None
    # Its blocks wait for each other: one wave, so at most one block a multiprocessor.
    if r.rows > FUSED_ROWS or r.batch > min(FUSED_BATCH, device.sm_count // 2):
        return None
    return deepest(-(-r.rows // 8), r.q_dtype == torch.float16, r.kv_dtype.itemsize == 1, device.capability)


def takes_warpgroup(request: AttentionRequest, device: DeviceTraits) -> bool:
    """Whether the two launches in CUDA C++ are right for ``request`` on ``device``, and wanted there."""
    r = request
    if device.warpgroup == "no" or (device.warpgroup == "measured" and not warpgroup_pays(r.batch)):
        return False
    plain = r.kind == "mla" and r.mask == "none"
    return plain and r.q_dtype.itemsize == r.kv_dtype.itemsize == 2 and r.rows <= WARPGROUP_ROWS


def make_plan(request: AttentionRequest, device: DeviceTraits, max_context: int) -> SplitPlan:
    """Plan for an admitted ``request``; ``max_context`` bounds the length of any request, in tokens."""
    if max_context < 1:
        raise ValueError(f"max_context is {max_context}, needs at least 1")
    family = arch_family(device.capability)
    main_dim = request.v_dim
    tile = choose_tile(
        family, request.kind, request.rows, main_dim, request.kv_dtype.itemsize, request.mask == "none"
    )
    variant = fused_variant(request, device)
    if variant is not None:
        tile = fused_tile(request.rows, variant.stages)
    elif takes_warpgroup(request, device):
        tile = warpgroup_tile(request.rows)
    if family == "interpreter" and not triton.knobs.runtime.interpret:
        tile = Tile("plain", tile.block_n, tile.block_r, 1, 1)
    splits = choose_splits(family, request.kind)
    row_blocks = -(-request.rows // tile.block_r)
    capacity = max(1, device.sm_count * splits.per_sm // (row_blocks * request.kv_heads))
    # Rounding adds up to one item a request; leave room for it so that one wave stays one wave.
    target = max(capacity - (request.batch - 1), -(-capacity // 2), 1)
    most_a_request = -(-max_context // splits.min_keys)
    items = min(target + request.batch - 1, request.batch * most_a_request)
    use, why = prefer(request, family, device.sm_count)
    reason = (
        f"{family} {tile.kernel} {tile.block_n}x{tile.block_r} w{tile.num_warps} s{tile.num_stages}, "
        f"{items} items for {device.sm_count} SMs, {request.rows} rows in {row_blocks}; {why}"
    )
    return SplitPlan(
        request,
        tile,
        splits,
        choose_merge(family, items, request.batch * request.tokens * request.q_heads, request.v_dim),
        target,
        items,
        row_blocks,
        partial_dtype(request, tile),
        early_merge=device.capability >= (9, 0),
        early_split=tile.kernel in ("hopper", "fused", "warpgroup"),
        use=use,
        reason=reason,
    )


def by_batch(
    request: AttentionRequest, device: DeviceTraits, max_context: int, batches: Iterable[int]
) -> list[tuple[int, int, SplitPlan]]:
    """Which kernel serves which batch sizes: first and last size of each run with one form, and the first's plan.

    ``request`` must be admitted at each of the sizes, which are taken in rising order.
    """
    found: list[tuple[int, int, SplitPlan]] = []
    for batch in sorted(set(batches)):
        plan = make_plan(replace(request, batch=batch), device, max_context)
        if found and found[-1][2].form == plan.form:
            found[-1] = (found[-1][0], batch, found[-1][2])
        else:
            found.append((batch, batch, plan))
    return found
