"""Texts of the system's own tools, as facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.verify_doctor.facts import children, host, load, nccl, nvidia, pci, sysfs

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
    row = "NVIDIA H200, 580.95.05, 9.0, 00000000:18:00.0, 143771, 700.00, 345, 1980, 1, 5, 8, 16, Disabled, 76.12, 3201, 3201, 31, 0, 0"
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


QUERY = """\
==============NVSMI LOG==============
Attached GPUs                             : 2
GPU 00000000:18:00.0
    Product Name                          : NVIDIA H200
    Serial Number                         : 1234567890
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 0
    FB Memory Usage
        Total                             : 143771 MiB
    BAR1 Memory Usage
        Total                             : 262144 MiB
        Used                              : 1 MiB
GPU 00000000:2A:00.0
    Fabric
        State                             : N/A
        Status                            : N/A
    BAR1 Memory Usage
        Total                             : 256 MiB
"""


def test_long_report_of_the_driver() -> None:
    found = nvidia.parse_query(QUERY)
    assert found == [
        {"bar1_mib": 262144, "fabric": "Completed, Success"},
        {"bar1_mib": 256, "fabric": None},
    ]
    assert "1234567890" not in str(found)
    assert nvidia.parse_query("") == []


def test_driver_parameters() -> None:
    text = 'EnablePCIeGen3: 0\nEnableResizableBar: 1\nMemoryPoolSize: 0\nRegistryDwords: "ForceP2P=0x11;RMForceP2PType=1"\n'
    assert nvidia.parse_parameters(text) == {
        "EnablePCIeGen3": "0",
        "EnableResizableBar": "1",
        "RegistryDwords.ForceP2P": "0x11",
        "RegistryDwords.RMForceP2PType": "1",
    }
    assert nvidia.parse_parameters("") == {}


def device(root: Path, chain: str, **files: str) -> Path:
    """A PCI device in a made-up ``/sys``, with its link in ``bus/pci/devices``."""
    place = root / "devices" / "pci0000:10" / chain
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text + "\n")
    link = root / "bus" / place.name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(place)
    return place


GPU = {
    "vendor": "0x10de",
    "class": "0x030200",
    "current_link_speed": "2.5 GT/s PCIe",
    "current_link_width": "16",
}
GPU |= {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}


def test_tree_of_devices(tmp_path: Path) -> None:
    switch = "0000:10:01.1/0000:11:00.0"
    device(tmp_path, f"{switch}/0000:12:00.0/0000:13:00.0", **GPU, numa_node="0")
    device(tmp_path, f"{switch}/0000:12:01.0/0000:14:00.0", **GPU, numa_node="-1")
    device(tmp_path, "0000:10:02.1/0000:20:00.0", **GPU, numa_node="1")
    device(tmp_path, "0000:10:03.1/0000:30:00.0", vendor="0x10de", **{"class": "0x040300"})
    for name in ("node0", "node1", "has_cpu"):
        (tmp_path / "node" / name).mkdir(parents=True)
    (tmp_path / "balancing").write_text("1\n")
    found = sysfs.gather(tmp_path / "bus", tmp_path / "node", tmp_path / "balancing")
    assert (found["nodes"], found["balancing"]) == (2, "1")
    assert [(gpu["slot"], gpu["node"]) for gpu in found["gpus"]] == [
        ("0000:13:00.0", 0),
        ("0000:14:00.0", None),
        ("0000:20:00.0", 1),
    ]
    assert found["gpus"][0]["chain"] == ["0000:10:01.1", "0000:11:00.0", "0000:12:00.0"]
    assert (found["gpus"][0]["link"], found["gpus"][0]["link_max"]) == ([2.5, 16], [32.0, 16])
    assert sysfs.switches(found["gpus"]) == [[0, 1]]
    nothing = tmp_path / "nothing"
    assert sysfs.gather(nothing, nothing, nothing) == {"gpus": [], "nodes": None, "balancing": None}


def test_no_load_on_a_gpu_in_use() -> None:
    assert load.busy([{"utilization_percent": 0, "memory_used_mib": 3}, {"utilization_percent": 90}]) == [1]
    assert "in use" in load.gather([{"memory_used_mib": 90000}])["error"]
    assert load.gather([]) == {"error": "no GPU"}


WORK = """
import time
print("begin", flush=True)
time.sleep(0.2)
print("end", flush=True)
print("[1.5]", flush=True)
"""


def test_load_is_sampled_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the work; on a machine without a driver there is nothing to sample."""
    found = load._measure(WORK, 30)
    assert found["tflops"] == [1.5] and found["clocks"]["samples"] >= 0
    assert "did not run to its end" in load._measure("raise SystemExit(1)", 30)["error"]
    assert "did not run to its end" in load._measure("import time; time.sleep(60)", 0.5)["error"]
