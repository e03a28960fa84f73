"""What the NVIDIA driver says: GPUs, their links, and the matrix of paths between them."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.bench_verify.gpu import probe
from sglang.verify_doctor.facts.reading import section

FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "capability": "compute_cap",
    "bus": "pci.bus_id",
    "memory_mib": "memory.total",
    "power_limit_w": "power.limit",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "link_generation": "pcie.link.gen.current",
    "link_generation_max": "pcie.link.gen.max",
    "link_width": "pcie.link.width.current",
    "link_width_max": "pcie.link.width.max",
    "mig": "mig.mode.current",
    "power_w": "power.draw",
    "memory_clock_mhz": "clocks.mem",
    "memory_clock_max_mhz": "clocks.max.mem",
    "temperature_c": "temperature.gpu",
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
}
_TEXTS = frozenset({"name", "driver", "capability", "bus", "mig"})
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")

# From near to far: NVLink, one PCIe switch, several switches, one host bridge, one NUMA node, between sockets.
PATHS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def gather() -> dict[str, Any]:
    """``tool``, ``driver``, ``gpus`` and ``paths``; without a driver only the first two, False and None.

    ``answers`` is False where the tool is there and fails, hangs, or prints something else.
    """
    if shutil.which("nvidia-smi") is None:
        return {"tool": False, "driver": _kernel_driver()}
    query = probe("nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits")
    gpus = parse_gpus(query)
    # A tool that hangs costs its time limit once.
    long = probe("nvidia-smi", "-q") if gpus else ""
    for gpu, more in zip(gpus, parse_query(long), strict=False):
        gpu |= more
    facts: dict[str, Any] = {
        "tool": True,
        "answers": bool(gpus),
        "driver": gpus[0]["driver"] if gpus else _kernel_driver(),
        "open_module": "open kernel module" in _read(DRIVER_VERSION).lower() or None,
        "parameters": parse_parameters(_read(DRIVER_PARAMETERS)),
        "gpus": gpus,
    }
    if len(gpus) > 1:
        facts["paths"] = parse_topology(probe("nvidia-smi", "topo", "-m"))
        facts["p2p_read"] = parse_topology(probe("nvidia-smi", "topo", "-p2p", "r"))
        facts["p2p_write"] = parse_topology(probe("nvidia-smi", "topo", "-p2p", "w"))
    return facts


def _kernel_driver() -> str | None:
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", _read(DRIVER_VERSION))
    return match[1] if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_parameters(text: str) -> dict[str, str]:
    """Settings of the driver module that decide about peer access and windows, from ``/proc/driver/nvidia/params``.

    ``RegistryDwords`` holds several of its own (``ForceP2P=0x11;...``); those are taken apart.
    """
    found = {}
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "RegistryDwords":
            for entry in value.strip('"').split(";"):
                key, equals, word = entry.strip().partition("=")
                if equals:
                    found[f"{name}.{key.strip()}"] = word.strip()
        elif any(word in name.lower() for word in ("p2p", "bar", "peer", "grdma", "pcie", "ats")):
            found[name] = value.strip('"')
    return found


def parse_query(text: str) -> list[dict[str, Any]]:
    """What only the long report of ``nvidia-smi -q`` has, a dictionary for each GPU in its order.

    ``bar1_mib`` is the window that peers see, ``fabric`` the state of the NVSwitch fabric (None where there is none).
    Serial numbers are not read.
    """
    gpus: list[dict[str, Any]] = []
    section = ""
    for line in text.splitlines():
        if re.match(r"GPU [0-9A-Fa-f]+:", line):
            gpus.append({"bar1_mib": None, "fabric": None})
            section = ""
            continue
        if not gpus:
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            section = name
        elif section.startswith("BAR1 Memory") and name == "Total":
            match = re.match(r"(\d+) MiB", value)
            gpus[-1]["bar1_mib"] = int(match[1]) if match else None
        elif section == "Fabric" and name in ("State", "Status") and value not in ("N/A", ""):
            gpus[-1]["fabric"] = f"{gpus[-1]['fabric']}, {value}" if gpus[-1]["fabric"] else value
    return gpus


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Rows of the query above. Clocks in MHz, power in W, memory in MiB; what the driver withholds is None."""
    gpus = []
    for row in csv.reader(text.splitlines()):
        cells = [cell.strip() for cell in row]
        if len(cells) != len(FIELDS):
            continue
        gpus.append({name: _cell(name, cell) for name, cell in zip(FIELDS, cells, strict=True)})
    return gpus


def _cell(name: str, text: str) -> Any:
    if text.startswith("[") or text in ("", "N/A"):
        return None
    if name in _TEXTS:
        return text
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def parse_topology(text: str) -> list[list[str]]:
    """The square matrix between GPUs of ``nvidia-smi topo``; columns for NICs, CPUs and NUMA are left out.

    An entry is what the driver prints: ``X`` on the diagonal, ``NV18``, ``PIX``, ``SYS``, or ``OK`` and its
    opposites for the peer-to-peer forms. Empty for one GPU, and for a text of another form.
    """
    rows = []
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if not columns and words[:1] == ["GPU0"] and len(words) > 1 and words[1] == "GPU1":
            columns = [index for index, word in enumerate(words) if re.fullmatch(r"GPU\d+", word)]
        elif columns and words and re.fullmatch(r"GPU\d+", words[0]):
            rows.append([words[index + 1] for index in columns if index + 1 < len(words)])
    return rows if len(rows) == len(columns) and all(len(row) == len(rows) for row in rows) else []


def farthest(paths: list[list[str]]) -> str | None:
    """The worst path between any two GPUs, by its class (``NV`` for any number of NVLinks); None for one GPU."""
    classes = set()
    for i, row in enumerate(paths):
        for j, entry in enumerate(row):
            if i != j:
                classes.add("NV" if entry.startswith("NV") and entry != "NODE" else entry)
    known = [name for name in PATHS if name in classes]
    return known[-1] if known else None


def strange(paths: list[list[str]]) -> list[str]:
    """Words between two GPUs that are no path we know, sorted: a form of another driver, or a new kind of link."""
    words = {str(entry) for i, row in enumerate(paths) for j, entry in enumerate(row) if i != j}
    return sorted(word for word in words if word not in PATHS and not re.fullmatch(r"NV\d+", word))


def denied(found: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Ordered pairs of GPUs between which the driver denies peer access, from the ``nvidia`` section."""
    pairs = set()
    for name in ("p2p_read", "p2p_write"):
        for i, row in enumerate(found.get(name) or []):
            pairs |= {(i, j) for j, entry in enumerate(row) if i != j and entry != "OK"}
    return sorted(pairs)


def capability(text: object) -> tuple[int, int] | None:
    """``"9.0"`` or ``[9, 0]`` as a pair."""
    parts = text.split(".") if isinstance(text, str) else text
    if isinstance(parts, (list, tuple)) and len(parts) == 2 and all(str(part).isdigit() for part in parts):
        return int(parts[0]), int(parts[1])
    return None


def count(facts: Mapping[str, Any]) -> int:
    """GPUs in the facts, by the driver or else by torch."""
    return len(section(facts, "nvidia").get("gpus") or section(facts, "torch").get("devices") or [])
