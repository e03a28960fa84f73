"""Texts of the system's own tools, as facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.verify_doctor.facts import children, host, nccl, nvidia, pci

TOPOLOGY_SWITCHES = """\
\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPIX\tSYS\tNODE\t0-63\t0\t\tN/A
GPU1\tPIX\t X \tSYS\tNODE\t0-63\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tNODE\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""

TOPOLOGY_NVLINK = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    0-31    0               N/A
GPU1    NV18     X      0-31    0               N/A
"""

TOPOLOGY_P2P = """\
        GPU0    GPU1
 GPU0   X       CNS
 GPU1   CNS     X

Legend:
"""


def test_topology() -> None:
    assert nvidia.parse_topology(TOPOLOGY_SWITCHES) == [
        ["X", "PIX", "SYS"],
        ["PIX", "X", "SYS"],
        ["SYS", "SYS", "X"],
    ]
    assert nvidia.parse_topology(TOPOLOGY_NVLINK) == [["X", "NV18"], ["NV18", "X"]]
    assert nvidia.parse_topology(TOPOLOGY_P2P) == [["X", "CNS"], ["CNS", "X"]]
    assert nvidia.parse_topology("") == []
    assert nvidia.parse_topology("GPU0 GPU1\nGPU0 X\n") == []
    assert nvidia.parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n") == []


@pytest.mark.parametrize(
    ("pair", "expected"),
    [("NV18", "NV"), ("PIX", "PIX"), ("PXB", "PXB"), ("PHB", "PHB"), ("NODE", "NODE"), ("SYS", "SYS")],
)
def test_farthest_of_a_pair(pair: str, expected: str) -> None:
    assert nvidia.farthest([["X", pair], [pair, "X"]]) == expected


def test_farthest_is_the_worst() -> None:
    assert nvidia.farthest(nvidia.parse_topology(TOPOLOGY_SWITCHES)) == "SYS"
    assert nvidia.farthest([["X"]]) is None


def test_gpu_rows() -> None:
    row = "NVIDIA H200, 580.95.05, 9.0, 00000000:18:00.0, 143771, 700.00, 345, 1980, 1, 5, 8, 16, Disabled"
    (gpu,) = nvidia.parse_gpus(row + "\nbroken, row\n")
    assert (gpu["name"], gpu["memory_mib"], gpu["link_width"], gpu["capability"]) == (
        "NVIDIA H200",
        143771,
        8,
        "9.0",
    )
    (gpu,) = nvidia.parse_gpus(row.replace("700.00", "[N/A]").replace("Disabled", "[N/A]"))
    assert gpu["power_limit_w"] is None and gpu["mig"] is None


@pytest.mark.parametrize(
    ("text", "expected"), [("9.0", (9, 0)), ([12, 0], (12, 0)), ("", None), (None, None), ("9", None)]
)
def test_capability(text: object, expected: tuple[int, int] | None) -> None:
    assert nvidia.capability(text) == expected


LSPCI = """\
0000:10:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab (rev 01) (prog-if 00 [Normal decode])
\tIOMMU group: 7
\tBus: primary=10, secondary=11, subordinate=1f, sec-latency=0
\tCapabilities: [58] Express (v2) Root Port (Slot+), MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <64us
\t\tLnkSta:\tSpeed 32GT/s, Width x16
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir{redir} CmpltRedir{redir} UpstreamFwd+ EgressCtrl- DirectTrans-
0000:11:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tBus: primary=11, secondary=12, subordinate=15, sec-latency=0
0000:12:00.0 3D controller: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition] (rev a1)
\tIOMMU group: 9
\tRegion 0: Memory at 9c000000 (32-bit, non-prefetchable) [size=64M]
\tRegion 1: Memory at 206000000000 (64-bit, prefetchable) [size=128G]
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x8 (downgraded)
0000:20:00.0 PCI bridge: Some other bridge
\tBus: primary=20, secondary=21, subordinate=22, sec-latency=0
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
0000:12:00.1 Audio device: NVIDIA Corporation Device 22e8 (rev a1)
"""


@pytest.mark.parametrize(("redir", "expected"), [("+", ["0000:10:01.1"]), ("-", [])])
def test_nccl_2079_acs_redirection(redir: str, expected: list[str]) -> None:
    devices = pci.parse(LSPCI.format(redir=redir))
    assert [device["slot"] for device in devices if device["gpu"]] == ["0000:12:00.0"]
    assert [bridge["slot"] for bridge in pci.above(devices, "0000:12:00.0")] == [
        "0000:10:01.1",
        "0000:11:00.0",
    ]
    # The bridge at 20:00.0 redirects too, but no GPU is below it.
    assert pci.redirecting(devices) == expected
    gpu = next(device for device in devices if device["gpu"])
    assert (gpu["link"], gpu["link_max"], gpu["iommu_group"]) == ([2.5, 8], [32.0, 16], 9)
    assert gpu["window_bytes"] == 128 << 30


def test_lspci_without_rights_or_domains() -> None:
    text = (
        "01:00.0 VGA compatible controller: NVIDIA Corporation Device 2b85\n\tCapabilities: <access denied>\n"
    )
    (device,) = pci.parse(text)
    assert device["slot"] == "0000:01:00.0" and device["gpu"] and not device["readable"]
    assert pci.parse("") == []


@pytest.mark.parametrize(
    ("command_line", "groups", "expected"),
    [
        ("quiet", {}, "off"),
        ("quiet iommu=pt amd_iommu=on", {"identity": 60}, "passthrough"),
        ("intel_iommu=on", {"DMA": 80, "identity": 2}, "translation"),
        ("", {"DMA-FQ": 61}, "translation"),
        ("iommu=pt", {"unknown": 3}, "passthrough"),
        ("intel_iommu=on,sm_on", {"unknown": 3}, "translation"),
        ("iommu.passthrough=1", {"unknown": 3}, "passthrough"),
        ("amd_iommu=off", {}, "off"),
        ("", {"unknown": 3}, "unknown"),
        ("iommu=on iommu=pt", {"unknown": 3}, "passthrough"),
    ],
)
def test_iommu(command_line: str, groups: dict[str, int], expected: str) -> None:
    assert host.iommu_state(host.iommu_parameters(command_line), groups) == expected


def test_command_line_keeps_only_what_matters() -> None:
    assert host.iommu_parameters("root=/dev/sda1 secret=1 pci=noacs iommu=pt") == {
        "pci": "noacs",
        "iommu": "pt",
    }


def test_group_types(tmp_path: Path) -> None:
    for index, kind in enumerate(("DMA-FQ", "DMA-FQ", "identity")):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "type").write_text(kind + "\n")
    assert host.group_types(tmp_path) == {"DMA-FQ": 2, "identity": 1}
    assert host.group_types(tmp_path / "none") == {}


def test_cpuinfo() -> None:
    text = "model name\t: Some CPU\nphysical id\t: 0\nflags\t: fpu avx2 amx_tile\n\nmodel name\t: Some CPU\nphysical id\t: 1\n"
    assert host.parse_cpuinfo(text) == {"model": "Some CPU", "sockets": 2, "features": ["avx2", "amx_tile"]}
    assert host.parse_cpuinfo("") == {"model": None, "sockets": None, "features": []}


def test_environment_hides_places_and_secrets() -> None:
    found = nccl.environment(
        {"NCCL_DEBUG_FILE": "a", "SGLANG_API_KEY": "b", "NCCL_ALGO": "Ring", "HOME": "c"}
    )
    assert found == {"NCCL_ALGO": "Ring", "NCCL_DEBUG_FILE": "(set)", "SGLANG_API_KEY": "(set)"}


def test_child_processes_that_fail() -> None:
    """Every way for a library to fail is an answer."""
    assert children.run("print('{\"a\": 1}')") == {"a": 1}
    assert "ModuleNotFoundError" in children.run("import no_such_module")["error"]
    assert "signal 6" in children.run("import os; os.abort()")["error"]
    assert "no answer within" in children.run("import time; time.sleep(60)", limit_s=0.5)["error"]
    assert "status 3" in children.run("raise SystemExit(3)")["error"]
    assert "no object" in children.run("print(1)")["error"]
