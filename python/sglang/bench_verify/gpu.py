"""What the NVIDIA driver says about the GPUs, at rest and while a measurement runs.

Read through ``nvidia-smi`` rather than a library: it is there wherever the driver is, it opens no
context on the GPU that is being measured, and a probe that hangs can be given up on.
"""

from __future__ import annotations

import csv
import os
import re
import statistics
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass

PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it. Clocks in MHz, power in W, temperature in degrees Celsius."""

    name: str = ""
    driver: str = ""
    memory_mib: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    mig: str = ""
    power_limit_w: float | None = None
    sm_clock_max_mhz: float | None = None


@dataclass(frozen=True)
class Load:
    """Medians over samples taken while the measurement ran: a clock read at rest says nothing."""

    samples: int = 0
    sm_clock_mhz: tuple[float, ...] = ()
    memory_clock_mhz: tuple[float, ...] = ()
    power_w: tuple[float, ...] = ()
    temperature_c: tuple[float, ...] = ()
    pcie_generation: tuple[float, ...] = ()
    pcie_width: tuple[float, ...] = ()


GPU_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "pcie_generation_max": "pcie.link.gen.max",
    "pcie_width_max": "pcie.link.width.max",
    "mig": "mig.mode.current",
    "power_limit_w": "power.limit",
    "sm_clock_max_mhz": "clocks.max.sm",
}
LOAD_FIELDS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
}


def _query(fields: Mapping[str, str]) -> list[dict[str, str]]:
    text = probe("nvidia-smi", "--query-gpu=" + ",".join(fields.values()), "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def probe(*command: str) -> str:
    """Standard output of a probe, or an empty string when it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
            encoding="utf-8",
            errors="replace",
            # The forms that are read below are those of the C locale.
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_gpus() -> list[Gpu]:
    """Every GPU of the machine; empty without an NVIDIA driver."""
    links = _nvlinks(probe("nvidia-smi", "nvlink", "--status"))
    found = []
    for index, row in enumerate(_query(GPU_FIELDS)):
        numbers = {name: _number(row[name]) for name in row if name not in ("name", "driver", "mig")}
        found.append(
            Gpu(
                name=row["name"],
                driver=row["driver"],
                mig=row["mig"],
                memory_mib=numbers["memory_mib"],
                pcie_generation=_integer(numbers["pcie_generation"]),
                pcie_width=_integer(numbers["pcie_width"]),
                pcie_generation_max=_integer(numbers["pcie_generation_max"]),
                pcie_width_max=_integer(numbers["pcie_width_max"]),
                power_limit_w=numbers["power_limit_w"],
                sm_clock_max_mhz=numbers["sm_clock_max_mhz"],
                nvlinks=links.get(index, 0),
            )
        )
    return found


def topology() -> str:
    """The matrix of paths between the GPUs, as the driver prints it."""
    return probe("nvidia-smi", "topo", "-m").strip()


def driver_cuda_version() -> str:
    """The newest CUDA the driver serves."""
    found = re.search(r"CUDA Version:\s*([0-9.]+)", probe("nvidia-smi"))
    return found.group(1) if found else ""


class Sampler:
    """Reads clocks, power and link of every GPU in a thread until stopped."""

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s = every_s
        self._rows: list[list[dict[str, str]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-verify-load", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        self._thread.start()

    def stop(self) -> Load:
        """End sampling; the medians."""
        self._stop.set()
        self._thread.join(PROBE_SECONDS)
        return _reduce(self._rows)

    def _run(self) -> None:
        while not self._stop.is_set():
            if reading := _query(LOAD_FIELDS):
                self._rows.append(reading)
            self._stop.wait(self._every_s)


def _nvlinks(status: str) -> dict[int, int]:
    """Active links by GPU from ``nvidia-smi nvlink --status``."""
    counts: dict[int, int] = {}
    gpu = -1
    for line in status.splitlines():
        if header := re.match(r"\s*GPU (\d+):", line):
            gpu = int(header.group(1))
            counts[gpu] = 0
        elif re.match(r"\s*Link \d+:\s*[0-9.]+ GB/s", line) and gpu in counts:
            counts[gpu] += 1
    return counts


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _reduce(rows: list[list[dict[str, str]]]) -> Load:
    """Median by GPU and field; the first reading is dropped when there are more, as clocks still rise."""
    kept = rows[1:] if len(rows) > 2 else rows
    if not kept:
        return Load()
    medians: dict[str, tuple[float, ...]] = {}
    for name in LOAD_FIELDS:
        columns: list[float] = []
        for gpu in range(min(len(row) for row in kept)):
            values = [number for row in kept if (number := _number(row[gpu][name])) is not None]
            if values:
                columns.append(statistics.median(values))
        medians[name] = tuple(columns)
    return Load(samples=len(kept), **medians)
