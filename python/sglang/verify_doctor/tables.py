"""Tables of the report: the GPUs one by one, and the matrix of paths between them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.verify_doctor.facts import nvidia, sysfs
from sglang.verify_doctor.facts.document import section


def of(group: str, facts: Mapping[str, Any], width: int) -> list[str]:
    """Lines of the table that goes with a group, none where there is none or where it would be too wide."""
    made = {"machine": gpus, "links": matrix}.get(group)
    try:
        return fitting(made(facts), width) if made is not None else []
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        # Facts from a file may be of any form, and the findings say so.
        return []


def fitting(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Rows as aligned lines; columns that do not fit are left out from the right, and that is said."""
    if len(rows) < 2:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    kept = len(widths)
    while kept > 1 and sum(widths[:kept]) + 2 * (kept - 1) > width:
        kept -= 1
    lines = [
        "  ".join(cell.ljust(size) for cell, size in zip(row[:kept], widths[:kept], strict=True)).rstrip()
        for row in rows
    ]
    left_out = [title for title in rows[0][kept:] if title]
    if left_out:
        lines.append(textwrap.shorten(f"(too narrow for: {', '.join(left_out)})", width, placeholder=" ...)"))
    return lines


def gpus(facts: Mapping[str, Any]) -> list[list[str]]:
    """One row a GPU, with a row of titles; only the titles where there is none."""
    found = section(facts, "nvidia").get("gpus") or []
    tree = {str(gpu["slot"]): gpu for gpu in section(facts, "sysfs").get("gpus") or []}
    groups = sysfs.switches(list(tree.values()))
    slots = list(tree)
    load = section(facts, "load", "clocks")
    rows = [["GPU", "name", "cap", "memory", "power W", "SM MHz", "link", "node", "switch"]]
    for index, gpu in enumerate(found):
        slot = _slot(str(gpu.get("bus") or ""))
        place = slots.index(slot) if slot in tree else -1
        switch = next((str(number) for number, group in enumerate(groups) if place in group), "-")
        rows.append(
            [
                str(index),
                _short(str(gpu.get("name") or "?")),
                ".".join(map(str, nvidia.capability(gpu.get("capability")) or ("?",))),
                f"{(gpu.get('memory_mib') or 0) / 1024:.0f} GiB",
                _pair(_at(load, "power_w", index) or gpu.get("power_w"), gpu.get("power_limit_w")),
                _pair(
                    _at(load, "sm_clock_mhz", index) or gpu.get("sm_clock_mhz"), gpu.get("sm_clock_max_mhz")
                ),
                _link(gpu, load, index),
                str(tree[slot]["node"]) if slot in tree and tree[slot]["node"] is not None else "-",
                switch,
            ]
        )
    return rows


def matrix(facts: Mapping[str, Any]) -> list[list[str]]:
    """The driver's matrix of paths with its titles."""
    paths = section(facts, "nvidia").get("paths") or []
    titles = ["", *(f"GPU{index}" for index in range(len(paths)))]
    return [titles, *([f"GPU{index}", *map(str, row)] for index, row in enumerate(paths))] if paths else []


def _slot(bus: str) -> str:
    """``00000000:11:00.0`` of the driver as ``0000:11:00.0`` of the kernel."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else bus


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ").removesuffix(" Server Edition")


def _at(load: Mapping[str, Any], name: str, index: int) -> float | None:
    values = load.get(name) or []
    return float(values[index]) if index < len(values) else None


def _pair(now: Any, most: Any) -> str:
    left = f"{float(now):.0f}" if isinstance(now, (int, float)) else "-"
    return f"{left}/{float(most):.0f}" if isinstance(most, (int, float)) else left


def _link(gpu: Mapping[str, Any], load: Mapping[str, Any], index: int) -> str:
    generation = _at(load, "pcie_generation", index) or gpu.get("link_generation")
    width, most = gpu.get("link_width"), gpu.get("link_generation_max")
    if not width or not most:
        return "-"
    return f"{_whole(generation)}x{width}/{most}x{gpu.get('link_width_max')}"


def _whole(value: Any) -> str:
    return f"{float(value):.0f}" if isinstance(value, (int, float)) else "?"
