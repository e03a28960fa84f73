"""Each fault from a fact that is broken, and silence from the same fact whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sglang.verify_doctor import checks
from sglang.verify_doctor.checks.devices import runs
from sglang.verify_doctor.checks.software import CPU_NEEDS
from sglang.verify_doctor.facts import document
from sglang.verify_doctor.findings import Finding, Level, note, worst

HERE = Path(__file__).parent
CPU, H200, RTX = "cpu_without_gpu", "h200_x2_nvlink", "rtxpro6000_x8_switches"

Change = Callable[[dict[str, Any]], Any]


def facts(name: str) -> dict[str, Any]:
    """A machine."""
    return copy.deepcopy(document.read(HERE / "facts" / f"{name}.json"))


@dataclass(frozen=True)
class Machine:
    """A recorded or constructed machine and what there is to say about it beyond ``ok``."""

    name: str
    serving: str
    status: Level
    about: tuple[str, ...] = ()


MACHINES = (
    Machine(CPU, "cpu", Level.NOTE),
    Machine(H200, "gpu", Level.NOTE),
    Machine(RTX, "gpu", Level.NOTE),
    Machine("rtxpro6000_x8_two_sockets", "gpu", Level.WARNING, ("topology",)),
    Machine("rtxpro6000_x8_iommu_translation", "gpu", Level.FAULT, ("iommu", "acs")),
    Machine("h200_x2_nvlink_vm", "gpu", Level.NOTE),
    # Recorded with a few packages of other versions than the wheel asks for, none of which serving needs.
    Machine("h200_x1_vm", "gpu", Level.WARNING, ("packages", "packages", "packages")),
    # Two over NVLink, recorded under load; FlashInfer's fused all-reduce cannot be compiled in that installation.
    Machine("h200_x2", "gpu", Level.WARNING, ("packages", "packages", "packages", "ranks")),
    Machine("t4_x1", "gpu", Level.FAULT, ("device",)),
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_machine(machine: Machine) -> None:
    found = checks.judge(facts(machine.name))
    assert checks.serving(facts(machine.name)) == machine.serving
    assert worst(found) is machine.status
    assert tuple(f.about for f in found if f.level in (Level.WARNING, Level.FAULT)) == machine.about


def test_every_machine_in_the_folder_is_judged() -> None:
    assert {file.stem for file in (HERE / "facts").glob("*.json")} == {machine.name for machine in MACHINES}


def set_pin(name: str, installed: str | None) -> Change:
    """Another installed version of a package."""

    def change(content: dict[str, Any]) -> None:
        (row,) = [row for row in content["packages"]["pins"] if row["name"] == name]
        row["installed"] = installed

    return change


def put(value: Any, *path: Any) -> Change:
    """Another value at a place in the facts."""

    def change(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return change


@dataclass(frozen=True)
class Case:
    """One broken fact on a machine that was whole."""

    name: str
    machine: str
    change: Change
    level: Level
    about: str
    says: tuple[str, ...]


FAULT, WARNING = Level.FAULT, Level.WARNING
UNDEFINED = {
    "present": True,
    "loads": False,
    "portable": True,
    "error": "ImportError: undefined symbol: _ZN3c10",
}
CASES = (
    Case(
        "sglang_29317 torch",
        H200,
        set_pin("torch", "2.12.0"),
        FAULT,
        "packages",
        ("torch 2.12.0", "sglang 0.5.17+verify.1", "torch==2.11.0", "undefined symbol"),
    ),
    Case(
        "triton",
        H200,
        set_pin("triton", "3.7.0"),
        FAULT,
        "packages",
        ("triton 3.7.0", "torch 2.11.0", "triton==3.6.0"),
    ),
    Case(
        "flashinfer",
        H200,
        set_pin("flashinfer-python", "0.7.2"),
        FAULT,
        "packages",
        ("flashinfer-python 0.7.2", "0.6.15.post1"),
    ),
    Case(
        "transformers on a CPU",
        CPU,
        set_pin("transformers", "4.57.0"),
        FAULT,
        "packages",
        ("transformers 4.57.0", "5.12.1"),
    ),
    Case("a lesser pin", CPU, set_pin("openai", "1.0"), WARNING, "packages", ("openai 1.0",)),
    Case(
        "not installed at all",
        CPU,
        put(None, "packages", "owners", "sglang"),
        FAULT,
        "packages",
        ("no installed sglang",),
    ),
    Case("python", CPU, put("3.9.18", "python", "version"), FAULT, "python", ("3.9.18", "3.10 to 3.13")),
    Case("python of tomorrow", CPU, put("3.14.0", "python", "version"), FAULT, "python", ("3.14.0",)),
    Case(
        "torch absent",
        CPU,
        put({"error": "ModuleNotFoundError: No module named 'torch'"}, "torch"),
        FAULT,
        "torch",
        ("not installed", "torch==2.11.0"),
    ),
    Case(
        "torch broken",
        CPU,
        put({"error": "ImportError: libcudart.so.13"}, "torch"),
        FAULT,
        "torch",
        ("does not load", "libcudart"),
    ),
    Case(
        "package missing for a CPU",
        CPU,
        set_pin("orjson", None),
        FAULT,
        "packages",
        ("missing for cpu serving: orjson",),
    ),
    Case(
        "kernel package missing", H200, set_pin("sglang-kernel", None), FAULT, "packages", ("sglang-kernel",)
    ),
    Case(
        "sglang_29317 kernels do not load",
        H200,
        put(UNDEFINED, "kernels"),
        FAULT,
        "kernels",
        ("undefined symbol", "sglang-kernel==0.4.5"),
    ),
    Case(
        "no kernels for a CPU",
        CPU,
        put({"present": False, "portable": False}, "kernels"),
        FAULT,
        "kernels",
        ("no portable",),
    ),
    Case(
        "sglang_4778 no driver library",
        H200,
        put(False, "torch", "driver_library"),
        FAULT,
        "driver",
        ("libcuda.so.1",),
    ),
    Case("no driver", H200, put(None, "nvidia", "driver"), FAULT, "driver", ("no NVIDIA driver",)),
    Case(
        "old driver",
        H200,
        put("550.54.15", "nvidia", "driver"),
        FAULT,
        "driver",
        ("550.54.15", "580.65.06", "CUDA 13.0"),
    ),
    Case(
        "sglang_24224 capability",
        H200,
        put("7.5", "nvidia", "gpus", 1, "capability"),
        FAULT,
        "device",
        ("GPU 1", "7.5", "8.0"),
    ),
    Case(
        "torch for CPUs",
        H200,
        put(None, "torch", "cuda"),
        FAULT,
        "torch",
        ("build for CPUs", "torch==2.11.0"),
    ),
    Case("torch sees nothing", H200, put([], "torch", "devices"), FAULT, "device", ("torch does not",)),
    Case(
        "sglang_14984 no code for the device",
        H200,
        put(["sm_80", "sm_100"], "torch", "architectures"),
        FAULT,
        "device",
        ("9.0", "sm_80"),
    ),
    Case("MIG", H200, put("Enabled", "nvidia", "gpus", 0, "mig"), WARNING, "device", ("MIG", "GPU 0")),
    Case(
        "small window",
        RTX,
        put(256 << 20, "pci", "devices", 1, "window_bytes"),
        WARNING,
        "link",
        ("256 MiB", "Resizable"),
    ),
    Case(
        "unequal GPUs",
        H200,
        put("NVIDIA H100", "nvidia", "gpus", 1, "name"),
        WARNING,
        "device",
        ("1x NVIDIA H200", "1x NVIDIA H100"),
    ),
    Case(
        "shared memory",
        RTX,
        put(99_000, "torch", "devices", 3, "shared_memory_optin_bytes"),
        FAULT,
        "shared memory",
        ("99,000", "101,376"),
    ),
    Case("host memory on a CPU", CPU, put(2 << 30, "host", "available_bytes"), FAULT, "memory", ("2.0 GiB",)),
    Case("small shm", RTX, put(64 << 20, "host", "shm_bytes"), WARNING, "memory", ("0.06 GiB", "--shm-size")),
    Case(
        "peer access denied",
        RTX,
        put("CNS", "nvidia", "p2p_read", 0, 5),
        WARNING,
        "topology",
        ("1 of the pairs", "GPU 0 to 5"),
    ),
    Case(
        "iommu",
        RTX,
        put({"DMA": 3}, "host", "iommu_groups"),
        FAULT,
        "iommu",
        ("iommu=pt", "NCCL_P2P_DISABLE=1"),
    ),
    Case(
        "nccl_2079 acs",
        RTX,
        put(True, "pci", "devices", 0, "acs", "ReqRedir"),
        FAULT,
        "acs",
        ("0000:10:00.0", "setpci"),
    ),
    Case("lanes", RTX, put(4, "nvidia", "gpus", 7, "link_width"), WARNING, "link", ("GPU 7", "4 of 16")),
    Case("another nccl", H200, put("2.19.3", "torch", "nccl"), WARNING, "nccl", ("2.19.3", "2.28.9")),
    Case(
        "a slip in a variable",
        H200,
        put({"NCCL_P2P_LEVL": "SYS"}, "environment"),
        WARNING,
        "settings",
        ("NCCL_P2P_LEVL", "NCCL_P2P_LEVEL?"),
    ),
    Case(
        "p2p off beside NVLink",
        H200,
        put({"NCCL_P2P_DISABLE": "1"}, "environment"),
        WARNING,
        "settings",
        ("NVLinks",),
    ),
    Case(
        "vllm_42609 expandable segments",
        H200,
        put({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "environment"),
        WARNING,
        "allocator",
        ("exported",),
    ),
    Case(
        "unequal power limits",
        RTX,
        put(300, "nvidia", "gpus", 2, "power_limit_w"),
        WARNING,
        "power",
        ("300, 600 W", "nvidia-smi -pl"),
    ),
    Case(
        "fabric manager not running",
        "h200_x2_nvlink_vm",
        put("In Progress", "nvidia", "gpus", 0, "fabric"),
        WARNING,
        "fabric",
        ("In Progress", "nvidia-fabricmanager"),
    ),
    Case(
        "small window by the driver's word",
        "h200_x2_nvlink_vm",
        lambda facts: (
            put(256, "nvidia", "gpus", 0, "bar1_mib")(facts),
            put([["X", "PHB"], ["PHB", "X"]], "nvidia", "paths")(facts),
        ),
        WARNING,
        "link",
        ("256 MiB", "Resizable"),
    ),
    Case(
        "link stays slow under load",
        RTX,
        put({"clocks": {"pcie_generation": [5] * 3 + [3] + [5] * 4}}, "load"),
        WARNING,
        "link",
        ("GPU 3", "PCIe 3.0", "5.0"),
    ),
    Case(
        "held back by heat",
        RTX,
        put(
            {
                "clocks": {"sm_clock_mhz": [2400] * 7 + [1200], "power_w": [500] * 8},
                "held_back": [{}] * 7 + [{"temperature": 5}],
            },
            "load",
        ),
        WARNING,
        "clocks",
        ("GPU 7", "1200 of 2430", "temperature"),
    ),
    Case(
        "one slow GPU",
        RTX,
        put({"clocks": {}, "tflops": [400.0] * 7 + [300.0]}, "load"),
        WARNING,
        "clocks",
        ("GPU 7 does 300", "400"),
    ),
    Case(
        "a value that cannot be meant",
        H200,
        put({"NCCL_NTHREADS": "many"}, "environment"),
        WARNING,
        "settings",
        ("NCCL_NTHREADS=many", "whole number"),
    ),
    Case(
        "a slip that NCCL itself was asked about",
        H200,
        put({"unread": {"NCCL_PROTOO": "NCCL_PROTO"}, "nccl_version": "2.28.9"}, "settings"),
        WARNING,
        "settings",
        ("NCCL 2.28.9 does not read it", "NCCL_PROTO?"),
    ),
    Case("not composed", CPU, put(False, "fork", "composed"), FAULT, "fork", ("not composed",)),
    Case(
        "topic off",
        CPU,
        put("off", "fork", "topics", 0, "state"),
        WARNING,
        "fork",
        ("switched off: fork-report",),
    ),
    Case(
        "unknown topic",
        CPU,
        put("SGLANG_FORK_DISABLE=x names a topic", "fork", "error"),
        FAULT,
        "fork",
        ("SGLANG_FORK_DISABLE=x",),
    ),
)


def bad(found: list[Finding], about: str) -> list[Finding]:
    """Warnings and faults about a matter."""
    return [f for f in found if f.about == about and f.level in (WARNING, FAULT)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_broken_fact(case: Case) -> None:
    content = facts(case.machine)
    mode = checks.serving(content)
    assert not bad(checks.judge(content, mode), case.about), "the machine was not whole before"
    case.change(content)
    found = bad(checks.judge(content, mode), case.about)
    assert found, "nothing was found"
    assert max(list(Level).index(f.level) for f in found) == list(Level).index(case.level)
    text = " ".join(f"{f.found} {f.cure}" for f in found)
    assert all(part in text for part in case.says), text
    assert all(f.cure for f in found)


@pytest.mark.parametrize(
    ("capability", "codes", "expected"),
    [
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100"], True),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90"], False),
        ((8, 0), ["compute_90", "what"], False),
    ],
)
def test_which_code_runs(capability: tuple[int, int], codes: list[str], expected: bool) -> None:
    assert runs(capability, codes) is expected


def test_p2p_off_makes_a_warning_of_it() -> None:
    content = facts("rtxpro6000_x8_iommu_translation")
    content["environment"] = {"NCCL_P2P_DISABLE": "1"}
    assert worst(checks.judge(content)) is WARNING


def test_hidden_capabilities_are_told() -> None:
    content = facts(RTX)
    for device in content["pci"]["devices"]:
        device["readable"], device["acs"] = False, None
    (finding,) = [f for f in checks.judge(content) if f.about == "acs"]
    assert finding.level is Level.NOTE and "root" in finding.found


@pytest.mark.parametrize("mode", ["cpu", "gpu"])
def test_any_section_may_be_absent(mode: str) -> None:
    """A probe that failed costs its own findings only."""
    for name in (CPU, H200, RTX):
        whole = facts(name)
        for section in [key for key in whole if key not in ("facts_version", "origin")]:
            for replacement in ({"error": "probe failed"}, None):
                checks.judge(whole | {section: replacement}, mode)
    assert worst(checks.judge({"facts_version": 1}, mode)) is Level.FAULT


def test_what_a_cpu_needs_is_in_its_lock() -> None:
    lock = (HERE.parents[1] / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    names = {line.partition("==")[0].strip() for line in lock.splitlines()}
    assert names >= CPU_NEEDS


def test_a_fault_without_a_cure_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a cure"):
        Finding(FAULT, "x", "broken")
    assert note("x", "y").cure == ""


def test_a_dense_load_at_the_power_limit_is_no_fault() -> None:
    """Matrix products reach the power limit of most cards; decoding does not."""
    content = facts(RTX)
    content["load"] = {
        "clocks": {"sm_clock_mhz": [1500] * 8, "power_w": [600] * 8},
        "held_back": [{"power limit": 4}] * 8,
        "tflops": [400.0] * 8,
    }
    found = [f for f in checks.judge(content) if f.about == "clocks"]
    assert {f.level for f in found} == {Level.OK, Level.NOTE} and "power limit" in found[1].found


def test_a_load_that_was_not_measured_is_told() -> None:
    content = facts(RTX)
    content["load"] = {"error": "GPU 0 is in use, and a load would disturb its work"}
    (found,) = [f for f in checks.judge(content) if f.about == "clocks"]
    assert found.level is Level.NOTE and "in use" in found.found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (RTX, "GPU 0-3 below one; GPU 4-7 below one"),
        ("rtxpro6000_x8_two_sockets", "no two GPUs share a PCIe switch"),
    ],
)
def test_switches(name: str, says: str) -> None:
    (found,) = [f for f in checks.judge(facts(name)) if f.about == "switches"]
    assert says in found.found


def test_numa() -> None:
    content = facts("rtxpro6000_x8_two_sockets")
    content["sysfs"]["balancing"] = "1"
    found = [f.found for f in checks.judge(content) if f.about == "numa"]
    assert found[0] == "2 nodes: GPU 0-3 near node 0; GPU 4-7 near node 1" and "moves pages" in found[1]


def test_changed_driver_settings_are_shown() -> None:
    content = facts(RTX)
    content["nvidia"]["parameters"] = {"RegistryDwords.ForceP2P": "0x11", "EnablePCIEGen3": "0"}
    (found,) = [f for f in checks.judge(content) if "module settings" in f.found]
    assert "ForceP2P=0x11" in found.found and "Gen3" not in found.found


def test_load_of_a_recorded_gpu() -> None:
    """One H200 in a virtual machine: a dense load ends at the power limit, and that is no warning."""
    found = [f for f in checks.judge(facts("h200_x1_vm")) if f.about in ("clocks", "link")]
    assert [f.level for f in found] == [Level.OK]
    assert found[0].found == "under load: 1680 MHz, 686 W, 58 C, 572.6 Tflop/s (bf16)"


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        (RTX, Level.NOTE, ("sm_120", "never run", "MLA bf16 triton 32x32")),
        (
            "h200_x1_vm",
            Level.OK,
            ("sm_90 (measured)", "MLA bf16 split and merge launches (CUDA C++) up to batch 64, then hopper"),
        ),
        ("t4_x1", Level.NOTE, ("7.5", "stock kernels")),
    ],
)
def test_kernels_of_an_architecture(name: str, level: Level, says: tuple[str, ...]) -> None:
    (found,) = [f for f in checks.judge(facts(name)) if f.group == "fork" and f.about == "kernels"]
    assert found.level is level and all(part in found.found for part in says), found.found


@pytest.mark.parametrize(
    ("fused", "warpgroup", "says", "not_says"),
    [
        (
            "auto",
            "auto",
            "MLA bf16 split and merge launches (CUDA C++) up to batch 64, then hopper 64x32, 4 warps; "
            "MLA fp8 hopper 64x32, 4 warps, from batch 4 on one launch (CUDA C++)",
            "",
        ),
        (
            "auto",
            "off",
            "MLA bf16 hopper 64x32, 4 warps, from batch 24 on one launch (CUDA C++); MLA fp8",
            "split",
        ),
        ("off", "off", "MLA bf16 hopper 64x32, 4 warps; MLA fp8", "CUDA C++"),
        (
            "off",
            "auto",
            "MLA bf16 split and merge launches (CUDA C++) up to batch 64, then hopper 64x32, 4 warps; MLA fp8",
            "one launch",
        ),
        ("off", "on", "MLA bf16 split and merge launches (CUDA C++); MLA fp8 hopper", "one launch"),
        (
            "auto",
            "on",
            "MLA bf16 split and merge launches (CUDA C++); MLA fp8 hopper 64x32, 4 warps, from batch 4 on one",
            "",
        ),
        ("on", "auto", "MLA bf16 one launch (CUDA C++); MLA fp8 one launch", "hopper"),
    ],
)
def test_kernels_in_cuda_are_named_where_they_run(
    fused: str, warpgroup: str, says: str, not_says: str
) -> None:
    content = facts("h200_x1_vm")
    content["environment"] |= {
        "SGLANG_FORK_FUSED_ATTENTION": fused,
        "SGLANG_FORK_WARPGROUP_ATTENTION": warpgroup,
    }
    (found,) = [f for f in checks.judge(content) if f.group == "fork" and f.about == "kernels"]
    assert says in found.found, found.found
    assert not not_says or not_says not in found.found
