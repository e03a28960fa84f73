"""Power and clocks at rest and under load, the NVSwitch fabric, driver settings, switches and NUMA nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.verify_doctor.facts import nvidia, sysfs
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, note, ok, warning

# A GPU below this share of its highest clock under a short load is held back by something.
CLOCK_SHARE_LEAST = 0.8
# GPUs of one kind that differ by more than this in rate do not keep step.
RATE_SPREAD_MOST = 0.1


def _gpus(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(section(facts, "nvidia").get("gpus") or [])


def spans(numbers: Sequence[int]) -> str:
    """``0-3, 6`` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def power(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Power limits; unequal ones make unequal ranks, and the slowest sets the pace of every all-reduce."""
    limits = [gpu.get("power_limit_w") for gpu in _gpus(facts)]
    known = sorted({float(limit) for limit in limits if limit})
    if not known:
        return []
    if len(known) > 1:
        return [
            warning(
                "power",
                f"limits differ: {', '.join(f'{limit:g}' for limit in known)} W",
                "set one limit for all (`nvidia-smi -pl WATTS`), or find out who lowered it",
            )
        ]
    return [ok("power", f"limit {known[0]:g} W each")]


def clocks(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Clocks and link under the short load, where one was asked for; at rest they say nothing."""
    gpus, load = _gpus(facts), section(facts, "load")
    if not gpus:
        return []
    if not load:
        return [note("clocks", "at rest; `--load` shows them, and the link, under 3 s of work on idle GPUs")]
    if "error" in load:
        return [note("clocks", f"not measured: {load['error']}")]
    measured = section(load, "clocks")
    found = [_under_load(index, gpu, measured, load) for index, gpu in enumerate(gpus)]
    findings = [finding for finding in found if finding is not None]
    rates = [rate for rate in load.get("tflops") or [] if rate]
    if len(rates) > 1 and min(rates) < (1 - RATE_SPREAD_MOST) * max(rates):
        findings.append(
            warning(
                "clocks",
                f"GPU {rates.index(min(rates))} does {min(rates):g} Tflop/s where GPU {rates.index(max(rates))} does "
                f"{max(rates):g}",
                "look at its temperature, power limit and seat: the slowest rank sets the pace",
            )
        )
    text = [_median(measured, "sm_clock_mhz", "MHz"), _median(measured, "power_w", "W")]
    text.append(_median(measured, "temperature_c", "C"))
    if rates:
        text.append(f"{min(rates):g} Tflop/s (bf16)")
    summary = ", ".join(part for part in text if part)
    return [ok("clocks", f"under load: {summary}"), *findings] if summary else findings


def _median(measured: Mapping[str, Any], name: str, unit: str) -> str:
    values = sorted({round(float(value)) for value in measured.get(name) or []})
    if not values:
        return ""
    return f"{values[0]} {unit}" if len(values) == 1 else f"{values[0]} to {values[-1]} {unit}"


def _at(measured: Mapping[str, Any], name: str, index: int) -> float | None:
    values = measured.get(name) or []
    return float(values[index]) if index < len(values) else None


def _under_load(
    index: int, gpu: Mapping[str, Any], measured: Mapping[str, Any], load: Mapping[str, Any]
) -> Finding | None:
    generation, most = _at(measured, "pcie_generation", index), gpu.get("link_generation_max")
    if generation is not None and isinstance(most, int) and generation < most:
        return warning(
            "link",
            f"GPU {index} runs its link as PCIe {generation:g}.0 under load, of {most}.0",
            "look for a slot, riser or firmware setting that limits the link's speed",
        )
    clock, top = _at(measured, "sm_clock_mhz", index), gpu.get("sm_clock_max_mhz")
    if clock is None or not top or clock >= CLOCK_SHARE_LEAST * top:
        return None
    held = load.get("held_back") or []
    reasons = ", ".join(held[index]) if index < len(held) and held[index] else "the driver gives no reason"
    drawn, limit = _at(measured, "power_w", index), gpu.get("power_limit_w")
    power = f", drawing {drawn:.0f} of {limit:g} W" if drawn is not None and limit else ""
    text = f"GPU {index} runs at {clock:.0f} of {top:g} MHz under a dense load ({reasons}{power})"
    # Dense matrix products reach the power limit of most cards; decoding, which waits for memory, does not.
    if "power limit" in reasons and "temperature" not in reasons:
        return note("clocks", text)
    return warning(
        "clocks", text, "look at cooling, power limit and locked clocks (`nvidia-smi -q -d PERFORMANCE`)"
    )


def fabric(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """NVSwitch machines need the fabric manager; without it CUDA does not start (error 802)."""
    states = {str(gpu["fabric"]) for gpu in _gpus(facts) if gpu.get("fabric")}
    bad = sorted(state for state in states if not state.startswith("Completed"))
    if not bad:
        return []
    return [
        warning(
            "fabric",
            f"the NVSwitch fabric is not ready: {'; '.join(bad)}",
            "start nvidia-fabricmanager of the driver's version, then look again",
        )
    ]


def parameters(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Settings of the driver module about peer access that somebody changed."""
    found = section(facts, "nvidia", "parameters")
    changed = {name: value for name, value in found.items() if name.startswith("RegistryDwords.")}
    usual = {
        "EnablePCIERelaxedOrderingMode": "0",
        "EnableResizableBar": "0",
        "GrdmaPciTopoCheckOverride": "0",
    }
    changed |= {name: value for name, value in found.items() if name in usual and value != usual[name]}
    if not changed:
        return []
    return [
        note(
            "driver",
            "module settings: " + ", ".join(f"{name}={value}" for name, value in sorted(changed.items())),
        )
    ]


def switches(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Which GPUs share a PCIe switch."""
    gpus = section(facts, "sysfs").get("gpus") or []
    if len(gpus) < 2 or nvidia.farthest(section(facts, "nvidia").get("paths") or []) in (None, "NV"):
        return []
    groups = sysfs.switches(gpus)
    if not groups:
        return [
            note("switches", "no two GPUs share a PCIe switch: every peer write goes through the processor")
        ]
    return [ok("switches", "; ".join(f"GPU {spans(group)} below one" for group in groups))]


def numa(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Which GPUs are near which memory, and whether the kernel moves pages about."""
    found = section(facts, "sysfs")
    gpus = found.get("gpus") or []
    if mode != "gpu" or not gpus or (found.get("nodes") or 1) < 2:
        return []
    by_node: dict[int | None, list[int]] = {}
    for index, gpu in enumerate(gpus):
        by_node.setdefault(gpu.get("node"), []).append(index)
    text = "; ".join(
        f"GPU {spans(numbers)} near node {node}" if node is not None else f"GPU {spans(numbers)}: not stated"
        for node, numbers in by_node.items()
    )
    findings = [ok("numa", f"{found['nodes']} nodes: {text}")]
    if found.get("balancing") == "1":
        findings.append(
            note(
                "numa",
                "the kernel moves pages between nodes, which stalls ranks now and then (sysctl kernel.numa_balancing=0 "
                "switches that off)",
            )
        )
    return findings
