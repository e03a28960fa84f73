"""Processor, memory, kernel command line and what the IOMMU does."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments.machine import available_bytes, parse_meminfo

IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")
# Kernel parameters that decide how devices reach each other's memory.
IOMMU_PARAMETERS = (
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "iommu.passthrough",
    "iommu.strict",
    "pci",
    "pcie_acs_override",
)
# Processor features that decide which CPU kernels can run.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "hypervisor")


def gather() -> dict[str, Any]:
    """Sizes in bytes; fields that cannot be read are None."""
    command_line = _read(Path("/proc/cmdline"))
    shm = Path("/dev/shm")
    return {
        "cpu": parse_cpuinfo(_read(Path("/proc/cpuinfo"))),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": parse_meminfo(_read(Path("/proc/meminfo"))).get("MemTotal"),
        "available_bytes": available_bytes(),
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
        "iommu_parameters": iommu_parameters(command_line),
        "iommu_groups": group_types(IOMMU_GROUPS),
    }


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_cpuinfo(text: str) -> dict[str, Any]:
    """Model name, sockets and the features that matter, from ``/proc/cpuinfo``."""
    model = None
    sockets = set()
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if name == "model name":
            model = value
        elif name == "physical id":
            sockets.add(value)
        elif name == "flags":
            flags.update(value.split())
    return {"model": model, "sockets": len(sockets) or None, "features": [f for f in FEATURES if f in flags]}


def iommu_parameters(command_line: str) -> dict[str, str]:
    """The kernel parameters about the IOMMU and PCI, the last one of a name winning as in the kernel.

    Only these are kept: the rest of a command line is nobody's business.
    """
    found = {}
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name in IOMMU_PARAMETERS:
            found[name] = value
    return found


def group_types(root: Path) -> dict[str, int]:
    """How many IOMMU groups there are of each type: ``identity`` passes through, ``DMA...`` translates."""
    types: Counter[str] = Counter()
    try:
        groups = sorted(root.iterdir())
    except OSError:
        return {}
    for group in groups:
        types[_read(group / "type").strip() or "unknown"] += 1
    return dict(types)


def iommu_state(parameters: dict[str, str], groups: dict[str, int]) -> str:
    """``off``, ``passthrough``, ``translation`` or ``unknown``.

    The groups tell what is so; the parameters only what was asked for, and serve where the groups are silent.
    """
    if any(kind.startswith("DMA") for kind in groups):
        return "translation"
    if groups.get("identity"):
        return "passthrough"
    asked = {part for value in parameters.values() for part in value.split(",")}
    if parameters.get("iommu.passthrough") == "1" or asked & {"pt", "passthrough"}:
        return "passthrough"
    if "off" in asked:
        return "off"
    if asked & {"on", "force"} and (parameters.keys() & {"iommu", "intel_iommu", "amd_iommu"}):
        return "translation"
    # No group at all means that no IOMMU is in use.
    return "unknown" if groups else "off"
