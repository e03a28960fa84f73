"""What a person is told: ``lspci -vvv`` and kernel command lines as saved, and the cure that follows."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.distributed.one_shot import cures
from sglang.srt.distributed.one_shot.attach import explain
from sglang.srt.distributed.one_shot.preflight import Fault
from sglang.srt.distributed.one_shot.topology import Topology, from_facts
from sglang.verify_doctor.facts import host, pci

LSPCI = """\
0000:10:00.0 PCI bridge: PLX Technology, Inc. PEX 890xx PCIe Gen 5 Switch (prog-if 00 [Normal decode])
	Bus: primary=0f, secondary=11, subordinate=11, sec-latency=0
	Capabilities: [148 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
		ACSCtl:	SrcValid{sv} TransBlk- ReqRedir{rr} CmpltRedir{cr} UpstreamFwd{uf} EgressCtrl- DirectTrans-
	Kernel driver in use: pcieport
0000:11:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)
	Region 2: Memory at 24000000000 (64-bit, prefetchable) [size=128G]
	Capabilities: [100 v1] Express (v2) Endpoint, MSI 00
		LnkSta:	Speed 32GT/s, Width x16
"""
HIDDEN = """\
0000:10:00.0 PCI bridge: PLX Technology, Inc. PEX 890xx (prog-if 00 [Normal decode])
	Bus: primary=0f, secondary=11, subordinate=11, sec-latency=0
	Capabilities: <access denied>
0000:11:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)
	Capabilities: <access denied>
"""


def machine(lspci: str, command_line: str, groups: dict[str, int] | None = None, **more: Any) -> Topology:
    facts = {
        "nvidia": {
            "gpus": [{"name": "RTX", "bus": "00000000:11:00.0"}, {"name": "RTX", "bus": "00000000:12:00.0"}],
            "paths": [["X", more.get("path", "PHB")], [more.get("path", "PHB"), "X"]],
            **({"p2p_write": more["p2p"]} if "p2p" in more else {}),
        },
        "pci": {"devices": pci.parse(lspci)},
        "host": {
            "cpu": {"sockets": 1, "features": more.get("features", [])},
            "iommu_parameters": host.iommu_parameters(command_line),
            "iommu_groups": groups or {},
        },
    }
    return from_facts(facts)


WITH_ACS = LSPCI.format(sv="+", rr="+", cr="+", uf="+")
WITHOUT_ACS = LSPCI.format(sv="-", rr="-", cr="-", uf="-")
DENIED = [["X", "CNS"], ["CNS", "X"]]


@pytest.mark.parametrize("bits", ["rr", "cr"])
def test_acs_redirection_is_named_with_its_bridge(bits: str) -> None:
    """NVIDIA/nccl#2079: a PHB pair deadlocks; the cure was ACS off (setpci)."""
    lspci = LSPCI.format(**{"sv": "+", "rr": "-", "cr": "-", "uf": "+", bits: "+"})
    text = cures.cure(cures.LOST, "PHB", machine(lspci, "quiet iommu=pt", {"identity": 9}))
    assert "setpci -s 10:00.0 ECAP_ACS+0x6.w=0000" in text and "NCCL_P2P_DISABLE=1" in text


@pytest.mark.parametrize(
    ("command_line", "groups", "expected"),
    [
        ("amd_iommu=on", {"DMA-FQ": 40}, "iommu=pt"),
        ("intel_iommu=on", {}, "iommu=pt"),
        ("intel_iommu=on iommu=pt", {"identity": 40}, "NCCL_P2P_DISABLE=1"),
        ("", {}, "NCCL_P2P_DISABLE=1"),
    ],
)
def test_iommu(command_line: str, groups: dict[str, int], expected: str) -> None:
    text = cures.cure(cures.LOST, "PHB", machine(WITHOUT_ACS, command_line, groups))
    assert expected in text
    assert ("translates" in text) == ("pt" not in command_line and bool(command_line))


def test_in_a_virtual_machine_the_guests_iommu_is_not_blamed() -> None:
    facts = machine(WITHOUT_ACS, "intel_iommu=on", {"DMA": 4}, features=["hypervisor"])
    assert "translates" not in cures.cure(cures.LOST, "PHB", facts)


def test_hidden_capabilities_ask_for_root() -> None:
    assert "as root" in cures.cure(cures.LOST, "PIX", machine(HIDDEN, "iommu=pt"))


def test_a_driver_override_is_named() -> None:
    facts = machine(WITHOUT_ACS, "iommu=pt", {"identity": 3}, p2p=DENIED)
    assert "driver override" in cures.cure(cures.WRONG, "PHB", facts)
    assert "use a driver with P2P" in cures.cure(cures.REFUSED, "PHB", facts)


def test_across_sockets() -> None:
    facts = machine(WITHOUT_ACS, "iommu=pt", {"identity": 3}, path="SYS")
    assert "NCCL_P2P_LEVEL=NODE" in cures.cure(cures.LOST, "SYS", facts)


def test_nvlink_is_not_told_about_acs() -> None:
    assert "nvlink" in cures.cure(cures.LOST, "NV", machine(WITH_ACS, "")).lower()


def test_every_kind_has_a_cure_everywhere() -> None:
    kinds = (cures.LOST, cures.WRONG, cures.LATE, cures.REFUSED, cures.SUM, cures.KERNEL)
    for kind in kinds:
        for link in ("NV", "PIX", "PXB", "PHB", "NODE", "SYS", "unknown", "same"):
            for facts in (Topology(), Topology(mig=True), machine(WITH_ACS, "")):
                assert len(cures.cure(kind, link, facts)) > 20


def test_the_line_names_rank_peer_link_and_cure() -> None:
    """rtx6kpro#15: all P2P queries say fine and the first reduction hangs."""
    decision = explain(Fault(cures.LOST, 1, 0, "no flag came"), machine(WITH_ACS, ""), [0, 1])
    assert decision.reason == "preflight failed: lost"
    for part in ("rank 1", "peer 0", "link PHB", "no flag came", "setpci"):
        assert part in decision.detail
