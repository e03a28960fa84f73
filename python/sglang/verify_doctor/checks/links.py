"""How GPUs reach each other: path classes, IOMMU, ACS, link width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.facts import host, nvidia, pci
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning

_WORDS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the processor's host bridge",
    "NODE": "the processor, several host bridges of one NUMA node",
    "SYS": "the link between processor sockets",
}
NO_P2P = "NCCL_P2P_DISABLE"


def _paths(facts: Mapping[str, Any]) -> list[list[str]]:
    return list(section(facts, "nvidia").get("paths") or [])


def crosses_pcie(facts: Mapping[str, Any]) -> bool:
    """Whether any two GPUs reach each other over PCIe."""
    return nvidia.farthest(_paths(facts)) not in (None, "NV")


def _p2p_off(facts: Mapping[str, Any]) -> bool:
    return str(section(facts, "environment").get(NO_P2P, "0")) not in ("0", "")


def topology(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The farthest path between two GPUs, and pairs whose peer access the driver denies."""
    far = nvidia.farthest(_paths(facts))
    strange = nvidia.strange(_paths(facts))
    findings = []
    if strange:
        words = ", ".join(strange)
        findings.append(
            note("topology", f"the driver calls a path between two GPUs {words}, which is not known here")
        )
    if far is None:
        if nvidia.count(facts) > 1 and not strange:
            return [note("topology", "several GPUs, but the driver shows no matrix of paths")]
        return findings
    findings.append(
        ok("topology", f"{nvidia.count(facts)} GPUs, the farthest two over {_WORDS.get(far, far)} ({far})")
    )
    denied = nvidia.denied(section(facts, "nvidia"))
    if denied and far != "NV":
        findings.append(
            warning(
                "topology",
                f"the driver denies peer access to {len(denied)} of the pairs (first: GPU {denied[0][0]} to {denied[0][1]})",
                f"all-reduce goes through host memory there; set {NO_P2P}=1, or use a driver with P2P for this GPU",
            )
        )
    if far == "SYS" and not _p2p_off(facts):
        findings.append(
            warning(
                "topology",
                "peer writes cross processor sockets, which is the slowest path and hangs on some platforms",
                "run `python -m sglang.bench_all_reduce`, which begins with a preflight of every pair, and compare "
                "NCCL_P2P_LEVEL=NODE with the default on your load",
            )
        )
    return findings


def iommu(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """An IOMMU that translates addresses breaks peer writes over PCIe on bare metal."""
    found = section(facts, "host")
    if mode != "gpu" or "iommu_parameters" not in found:
        return []
    state = host.iommu_state(dict(found["iommu_parameters"]), dict(found.get("iommu_groups") or {}))
    if state != "translation":
        return [ok("iommu", state)]
    if nvidia.count(facts) < 2 or not crosses_pcie(facts):
        return [note("iommu", "translates addresses; no harm here, since no GPU reaches another over PCIe")]
    if "hypervisor" in (section(found, "cpu").get("features") or []):
        return [
            note("iommu", "translates addresses inside a virtual machine; the host decides about peer access")
        ]
    text = "translates addresses, so that peer writes over PCIe hang or reach the wrong memory"
    cure = "start the kernel with iommu=pt, or switch the IOMMU off in the firmware"
    if _p2p_off(facts):
        return [warning("iommu", f"{text}; {NO_P2P} keeps NCCL away from them", cure)]
    return [fault("iommu", text, f"{cure}; until then set {NO_P2P}=1")]


def acs(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Bridges above GPUs must not send peer traffic up to the processor."""
    found = section(facts, "pci")
    devices = found.get("devices")
    if mode != "gpu" or nvidia.count(facts) < 2 or not crosses_pcie(facts):
        return []
    if not devices:
        return [note("acs", f"not known: {found.get('error', 'no PCI facts')}")]
    slots = pci.redirecting(devices)
    if slots:
        text = (
            f"peer traffic is sent up to the processor by {len(slots)} bridge(s) (first: {slots[0]}, ReqRedir or "
            "CmpltRedir on)"
        )
        cure = (
            "switch ACS off in the firmware, or at each start with "
            f"`setpci -s {slots[0].removeprefix('0000:')} ECAP_ACS+0x6.w=0000`"
        )
        if _p2p_off(facts):
            return [warning("acs", text, cure)]
        return [
            fault(
                "acs",
                f"{text}; peer writes then hang on some platforms",
                f"{cure}; until then set {NO_P2P}=1",
            )
        ]
    if any(not device["readable"] for device in devices):
        return [
            note("acs", "not known: PCI capabilities are hidden from this user; run the doctor as root once")
        ]
    return [ok("acs", "no bridge above a GPU redirects peer traffic")]


def window(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Peers reach a GPU's memory through its PCI window, which has to show all of it."""
    if mode != "gpu" or nvidia.count(facts) < 2 or not crosses_pcie(facts):
        return []
    sizes = [
        device.get("window_bytes") for device in section(facts, "pci").get("devices") or [] if device["gpu"]
    ]
    memory = max(
        (gpu.get("memory_mib") or 0 for gpu in section(facts, "nvidia").get("gpus") or []), default=0
    )
    sizes += [
        gpu["bar1_mib"] << 20 for gpu in section(facts, "nvidia").get("gpus") or [] if gpu.get("bar1_mib")
    ] * (not any(sizes))
    small = [size for size in sizes if size and size < memory << 20]
    if not small:
        return []
    return [
        warning(
            "link",
            f"{len(small)} GPUs show {min(small) >> 20} MiB of their {memory} MiB to peers",
            "switch Resizable BAR and Above 4G Decoding on in the firmware",
        )
    ]


def width(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """A link with fewer lanes than it has is a seating or riser problem. Generation drops at rest and is no sign."""
    findings = []
    for index, gpu in enumerate(section(facts, "nvidia").get("gpus") or []):
        have, most = gpu.get("link_width"), gpu.get("link_width_max")
        if isinstance(have, int) and isinstance(most, int) and have < most:
            findings.append(
                warning(
                    "link",
                    f"GPU {index} runs on {have} of {most} lanes",
                    "reseat the card or its riser, and look for a slot that shares lanes",
                )
            )
    return findings
