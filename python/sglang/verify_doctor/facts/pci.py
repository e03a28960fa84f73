"""PCI bridges, and whether they send traffic between devices up to the processor (ACS redirection).

With redirection on, a write from one GPU to another below the same switch goes up to the root complex and
comes down again: slower at the best, and a hang or a silent loss where the platform does not route it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

from sglang.bench_verify.gpu import probe

# The bits of the ACS control register that take a peer write away from the direct path.
REDIRECTING = ("ReqRedir", "CmpltRedir")
_SLOT = re.compile(r"^((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)$")
_GROUP = re.compile(r"IOMMU group: (\d+)")
_SPEED = re.compile(r"Speed ([\d.]+)GT/s.*?Width x(\d+)")
_WINDOW = re.compile(r"Memory at .*\[size=(\d+)([KMGT]?)\]")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_BUSES = re.compile(r"primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")


def gather() -> dict[str, Any]:
    """``{"devices": [...]}`` for bridges and NVIDIA devices, or why there is nothing."""
    if shutil.which("lspci") is None:
        return {"error": "lspci is not installed"}
    text = probe("lspci", "-D", "-vvv")
    if not text:
        return {"error": "lspci gave no answer"}
    return {"devices": [entry for entry in parse(text) if entry["bridge"] or entry["gpu"]]}


def parse(text: str) -> list[dict[str, Any]]:
    """Every device of ``lspci -vvv``, with or without domains in the slots.

    A device has ``slot``, ``name``, ``bridge``, ``gpu``, ``readable`` (capabilities were shown), ``acs`` (control
    bits by name, None where the device has no such capability), ``link`` and ``link_max`` (GT/s, lanes), ``buses``
    (secondary and last bus below a bridge), ``iommu_group`` and ``window_bytes`` (its largest memory window).
    """
    devices: list[dict[str, Any]] = []
    for line in text.splitlines():
        head = _SLOT.match(line)
        if head is not None:
            devices.append(_device(head[1], head[2]))
        elif devices:
            _detail(devices[-1], line.strip())
    return devices


def _device(slot: str, name: str) -> dict[str, Any]:
    return {
        "slot": slot if slot.count(":") == 2 else f"0000:{slot}",
        "name": name,
        "bridge": name.startswith("PCI bridge"),
        "gpu": "NVIDIA" in name and name.startswith(("3D controller", "VGA compatible")),
        "readable": True,
        "acs": None,
        "link": None,
        "link_max": None,
        "buses": None,
        "iommu_group": None,
        "window_bytes": None,
    }


def _detail(device: dict[str, Any], line: str) -> None:
    if line.startswith("Capabilities: <access denied>"):
        device["readable"] = False
    elif line.startswith("ACSCtl:"):
        device["acs"] = {word[:-1]: word[-1] == "+" for word in line.split()[1:] if word[-1] in "+-"}
    elif line.startswith(("LnkSta:", "LnkCap:")):
        match = _SPEED.search(line)
        if match is not None:
            device["link_max" if line.startswith("LnkCap") else "link"] = [float(match[1]), int(match[2])]
    elif match := _GROUP.match(line):
        device["iommu_group"] = int(match[1])
    elif match := _WINDOW.search(line):
        size = int(match[1]) << _UNITS[match[2]]
        device["window_bytes"] = max(size, device["window_bytes"] or 0)
    elif match := _BUSES.search(line):
        device["buses"] = [int(match[2], 16), int(match[3], 16)]


def above(devices: list[Mapping[str, Any]], slot: str) -> list[Mapping[str, Any]]:
    """Bridges between a device and the processor, in any order."""
    domain, bus = slot.split(":")[0], int(slot.split(":")[1], 16)
    return [
        bridge
        for bridge in devices
        if bridge["buses"]
        and bridge["slot"].startswith(domain)
        and bridge["buses"][0] <= bus <= bridge["buses"][1]
    ]


def redirecting(devices: list[Mapping[str, Any]]) -> list[str]:
    """Slots of bridges above a GPU that redirect peer traffic."""
    slots = set()
    for device in devices:
        if not device["gpu"]:
            continue
        for bridge in above(devices, device["slot"]):
            if any((bridge["acs"] or {}).get(bit) for bit in REDIRECTING):
                slots.add(bridge["slot"])
    return sorted(slots)
