"""Where the GPUs hang in the tree of PCI devices, from ``/sys``: bridges above, NUMA node, link. No rights needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
BALANCING = Path("/proc/sys/kernel/numa_balancing")
NVIDIA = "0x10de"
_SLOT = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def gather(devices: Path = DEVICES, nodes: Path = NODES, balancing: Path = BALANCING) -> dict[str, Any]:
    """``gpus`` (slot, node, chain of bridges from the root down, link and its limits), ``nodes``, ``balancing``.

    A link is ``[GT/s, lanes]``. ``node`` is None where the firmware does not say.
    """
    return {
        "gpus": [_gpu(device) for device in _gpus(devices)],
        "nodes": _nodes(nodes),
        "balancing": _text(balancing) or None,
    }


def _gpus(devices: Path) -> list[Path]:
    try:
        found = sorted(devices.iterdir())
    except OSError:
        return []
    # Class 0x0300 is a VGA controller, 0x0302 a 3D controller.
    return [
        device
        for device in found
        if _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(("0x0300", "0x0302"))
    ]


def _gpu(device: Path) -> dict[str, Any]:
    node = _text(device / "numa_node")
    chain = [part for part in device.resolve().parts[:-1] if _SLOT.match(part)]
    return {
        "slot": device.name,
        "node": int(node) if node.lstrip("-").isdigit() and int(node) >= 0 else None,
        "chain": chain,
        "link": _link(device, "current"),
        "link_max": _link(device, "max"),
        "iommu": _text(device / "iommu_group" / "type") or None,
    }


def _link(device: Path, which: str) -> list[float] | None:
    speed = re.match(r"([\d.]+)", _text(device / f"{which}_link_speed"))
    width = re.match(r"(\d+)", _text(device / f"{which}_link_width"))
    return [float(speed[1]), int(width[1])] if speed and width and int(width[1]) else None


def _nodes(nodes: Path) -> int | None:
    try:
        return sum(bool(re.fullmatch(r"node\d+", entry.name)) for entry in nodes.iterdir()) or None
    except OSError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def switches(gpus: list[Mapping[str, Any]]) -> list[list[int]]:
    """GPUs (by their order in ``gpus``) that share a bridge below the root port: they sit behind one switch.

    A root port carries one device or one switch, so a chain of two bridges or more means a switch, and GPUs with the
    same first two bridges share it. GPUs that hang at a root port of their own are in no group.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, gpu in enumerate(gpus):
        chain = list(gpu.get("chain") or [])
        if len(chain) >= 2:
            groups.setdefault(tuple(chain[:2]), []).append(index)
    return [group for group in groups.values() if len(group) > 1]
