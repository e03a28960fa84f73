"""How the GPUs of a group reach each other, as one value made by pure functions from recorded facts.

The facts are the doctor's (``sglang.verify_doctor.facts``): the driver's matrix of paths, ``lspci -vvv`` and the
kernel command line. Nothing here opens a GPU context, and nothing here decides: ``gate`` and ``policy`` do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.verify_doctor.facts import host, nccl, nvidia, pci
from sglang.verify_doctor.facts.document import section

#: Where ranks are simulated by processes of one processor.
CPU_LINK = "cpu"
#: Two ranks on one device (tests only).
SAME_DEVICE = "same"
#: No matrix of paths: one has to assume the worst.
UNKNOWN_LINK = "unknown"
#: From near to far. ``nvidia.PATHS`` with our own names around it.
LINKS = (SAME_DEVICE, *nvidia.PATHS, UNKNOWN_LINK)


@dataclass(frozen=True)
class Topology:
    """What is known of the GPUs of this machine and of the paths between them.

    Attributes:
        names: name of each GPU, by the driver's index.
        buses: PCI slot of each GPU, ``0000:11:00.0``.
        paths: square matrix of path names as the driver prints them (``NV18``, ``PIX`` ... ``SYS``, ``X``).
        driver: version of the driver, or "".
        sockets: processors of the machine, None if unknown.
        redirecting: slots of bridges above GPUs that send peer traffic up to the processor (ACS).
        acs_known: False where the PCI capabilities could not be read, so that ``redirecting`` says nothing.
        iommu: ``off``, ``passthrough``, ``translation`` or ``unknown``.
        virtual: the processor reports a hypervisor.
        denied: ordered pairs of GPU indices between which the driver denies peer access.
        mig: some GPU is split into instances.
        settings: NCCL and allocator variables of the environment.
    """

    names: tuple[str, ...] = ()
    buses: tuple[str, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()
    driver: str = ""
    sockets: int | None = None
    redirecting: tuple[str, ...] = ()
    acs_known: bool = False
    iommu: str = "unknown"
    virtual: bool = False
    denied: frozenset[tuple[int, int]] = frozenset()
    mig: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    def pair(self, a: int, b: int) -> str:
        """Class of the path between two GPU indices, one of ``LINKS``."""
        if a == b:
            return SAME_DEVICE
        if not (0 <= a < len(self.paths) and 0 <= b < len(self.paths)):
            return UNKNOWN_LINK
        entry = self.paths[a][b]
        if entry.startswith("NV"):
            return "NV"
        return entry if entry in nvidia.PATHS else UNKNOWN_LINK

    def link(self, devices: Sequence[int]) -> str:
        """The farthest path between any two of these GPUs; it sets the pace of an all-reduce."""
        classes = {self.pair(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]}
        return max(classes, key=LINKS.index) if classes else SAME_DEVICE

    def islands(self, devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Ranks (positions in ``devices``) grouped so that only paths between groups cross processor sockets."""
        groups: list[list[int]] = []
        for rank, device in enumerate(devices):
            for group in groups:
                if all(self.pair(devices[other], device) not in ("SYS", UNKNOWN_LINK) for other in group):
                    group.append(rank)
                    break
            else:
                groups.append([rank])
        return tuple(tuple(group) for group in groups)

    def index_of(self, bus: str) -> int:
        """The driver's index of the GPU in a PCI slot, -1 if the driver does not list it.

        ``CUDA_VISIBLE_DEVICES`` renumbers GPUs for CUDA, not for ``nvidia-smi``: slots are what both agree on.
        """
        wanted = slot(bus)
        return self.buses.index(wanted) if wanted in self.buses else -1

    def describe(self) -> list[tuple[str, str]]:
        """Lines for a person: what, and how it is here."""
        counts: dict[str, int] = {}
        for name in self.names:
            counts[name] = counts.get(name, 0) + 1
        lines = [
            ("GPUs", ", ".join(f"{number}x {name}" for name, number in counts.items()) or "none"),
            ("driver", self.driver or "not known"),
        ]
        if len(self.paths) > 1:
            whole = range(len(self.paths))
            lines += [
                ("farthest path", self.link(list(whole))),
                ("islands", " | ".join(",".join(map(str, group)) for group in self.islands(list(whole)))),
            ]
        lines += [
            ("sockets", str(self.sockets) if self.sockets else "not known"),
            ("IOMMU", self.iommu + (" (virtual machine)" if self.virtual else "")),
            ("ACS", _acs_text(self)),
        ]
        if self.denied:
            lines.append(("peer access denied", f"{len(self.denied)} of the ordered pairs"))
        for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
            if name in self.settings:
                lines.append((name, self.settings[name]))
        return lines


def _acs_text(topology: Topology) -> str:
    if topology.redirecting:
        return "peer traffic is redirected by " + ", ".join(topology.redirecting)
    return "no bridge above a GPU redirects" if topology.acs_known else "not known"


def slot(bus: str) -> str:
    """A PCI address in the form of ``lspci -D``: the driver prints eight digits of domain and upper case."""
    domain, _, rest = bus.strip().lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest.count(":") == 1 else f"0000:{bus.strip().lower()}"


def from_facts(facts: Mapping[str, Any]) -> Topology:
    """Topology of a document of the doctor's facts; absent sections leave their fields unknown."""
    driver = section(facts, "nvidia")
    machine = section(facts, "host")
    bridges = section(facts, "pci").get("devices") or []
    gpus = driver.get("gpus") or []
    denied = set()
    for name in ("p2p_read", "p2p_write"):
        for i, row in enumerate(driver.get(name) or []):
            denied |= {(i, j) for j, entry in enumerate(row) if i != j and entry != "OK"}
    return Topology(
        names=tuple(str(gpu.get("name") or "") for gpu in gpus),
        buses=tuple(slot(str(gpu.get("bus") or "")) for gpu in gpus),
        paths=tuple(tuple(row) for row in driver.get("paths") or []),
        driver=str(driver.get("driver") or ""),
        sockets=section(machine, "cpu").get("sockets"),
        redirecting=tuple(pci.redirecting(bridges)),
        acs_known=bool(bridges) and all(device["readable"] for device in bridges),
        iommu=host.iommu_state(
            dict(machine.get("iommu_parameters") or {}), dict(machine.get("iommu_groups") or {})
        )
        if "iommu_parameters" in machine
        else "unknown",
        virtual="hypervisor" in (section(machine, "cpu").get("features") or []),
        denied=frozenset(denied),
        mig=any(gpu.get("mig") == "Enabled" for gpu in gpus),
        settings={k: str(v) for k, v in section(facts, "environment").items()},
    )


def gather_facts() -> dict[str, Any]:
    """The doctor's sections that a topology is made of; each tool is bounded in time."""
    return {
        "nvidia": nvidia.gather(),
        "pci": pci.gather(),
        "host": host.gather(),
        "environment": nccl.environment(os.environ),
    }


def gather() -> Topology:
    """Look at this machine; what cannot be read stays unknown."""
    return from_facts(gather_facts())
