"""Driver, compute capability, shared memory, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning
from sglang.verify_doctor.versions import key

GIB = 1 << 30
CAPABILITY_MIN = (8, 0)
# The oldest driver that runs programs built for a CUDA release line.
DRIVER_FOR_CUDA = {12: "525.60.13", 13: "580.65.06"}
# What a block may use on SM120 (and SM86, SM89); every kernel of the fork has a configuration below it.
SHARED_MEMORY_LEAST = 101_376
SHM_LEAST = 1 * GIB
CPU_MEMORY_LEAST = 4 * GIB


def _gpus(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(section(facts, "nvidia").get("gpus") or section(facts, "torch").get("devices") or [])


def driver(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """GPU serving needs a driver that torch's CUDA can run on."""
    found = section(facts, "nvidia")
    version = found.get("driver")
    if mode == "cpu":
        return [note("driver", "no NVIDIA driver: this machine serves on its CPU")] if not version else []
    cuda = section(facts, "torch").get("cuda")
    if found.get("tool") and found.get("answers") is False:
        return [
            fault(
                "driver",
                f"{version or 'a driver'} is installed, but nvidia-smi fails or gives no list of GPUs within 10 s",
                "run `nvidia-smi`: a tool of another version than the driver asks for a reboot; one that hangs has a GPU "
                "in trouble behind it, named after `Xid` in `dmesg`",
            )
        ]
    if not version:
        return [
            fault(
                "driver",
                "no NVIDIA driver answers",
                "install the driver, or give the container its GPUs (--gpus all)",
            )
        ]
    if section(facts, "torch").get("driver_library") is False:
        return [
            fault(
                "driver",
                f"{version}, but libcuda.so.1 is not to be found",
                "give the container the driver's libraries (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
            )
        ]
    line = int(str(cuda).split(".")[0]) if cuda else 0
    least = DRIVER_FOR_CUDA.get(line)
    have, want = key(str(version)), key(least) if least else None
    if have is not None and want is not None and have < want:
        return [
            fault(
                "driver",
                f"{version} is older than {least}, which CUDA {cuda} needs",
                f"update the driver to {least} or later",
            )
        ]
    if not _gpus(facts):
        return [
            fault(
                "driver",
                f"{version}, but no GPU is visible",
                "unset CUDA_VISIBLE_DEVICES, or look at `nvidia-smi`",
            )
        ]
    return [ok("driver", f"{version}" + (f" for CUDA {cuda}" if cuda else ""))]


def capability(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """No kernel is built for devices before Ampere."""
    findings = []
    names: dict[str, int] = {}
    for index, gpu in enumerate(_gpus(facts)):
        have = nvidia.capability(gpu.get("capability"))
        label = f"{gpu.get('name')}" + (f" (capability {have[0]}.{have[1]})" if have else "")
        names[label] = names.get(label, 0) + 1
        if have is not None and have < CAPABILITY_MIN:
            findings.append(
                fault(
                    "device",
                    f"GPU {index} is {label}, the kernels need {CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]}",
                    "use a GPU of the Ampere generation or later, or hide this one with CUDA_VISIBLE_DEVICES",
                )
            )
    if len(names) > 1:
        findings.append(
            warning(
                "device",
                "GPUs differ: " + ", ".join(f"{number}x {label}" for label, number in names.items()),
                "serve on equal GPUs (CUDA_VISIBLE_DEVICES): the slowest one sets the pace",
            )
        )
    elif names and not findings:
        label, number = next(iter(names.items()))
        findings.append(ok("device", f"{number}x {label}"))
    return findings


def architectures(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Torch must see the GPUs that the driver sees, and hold code that they can run."""
    found = section(facts, "torch")
    if mode != "gpu" or "devices" not in found or not found.get("cuda"):
        return []
    if not found["devices"]:
        if not section(facts, "nvidia").get("gpus"):
            return []
        return [
            fault(
                "device",
                "the driver sees GPUs, torch does not",
                "unset CUDA_VISIBLE_DEVICES, and look at `python -c 'import torch; torch.cuda.init()'`",
            )
        ]
    codes = [str(code) for code in found.get("architectures") or []]
    pairs = sorted(
        {pair for device in found["devices"] if (pair := nvidia.capability(device.get("capability")))}
    )
    without = [pair for pair in pairs if codes and not runs(pair, codes)]
    if without:
        text = ", ".join(f"{major}.{minor}" for major, minor in without)
        return [
            fault(
                "device",
                f"torch {found.get('version')} holds no code for capability {text} (it has {', '.join(codes)})",
                "install the torch that sglang pins, whose CUDA build covers it",
            )
        ]
    return []


def runs(capability: tuple[int, int], codes: list[str]) -> bool:
    """Whether code of ``sm_XY`` (same major, no later minor) or ``compute_XY`` (any earlier) runs on a device."""
    for code in codes:
        kind, _, number = code.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        have = (int(digits[:-1]), int(digits[-1]))
        exact = number != digits
        if kind == "compute" and have <= capability:
            return True
        if kind == "sm" and (
            have == capability if exact else have[0] == capability[0] and have <= capability
        ):
            return True
    return False


def partitions(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """A GPU split by MIG has no peer access."""
    split = [
        i for i, gpu in enumerate(section(facts, "nvidia").get("gpus") or []) if gpu.get("mig") == "Enabled"
    ]
    if not split or nvidia.count(facts) < 2:
        return []
    return [
        warning(
            "device",
            f"MIG is on for GPU {', '.join(map(str, split))}, and its instances have no peer access",
            "serve a model on one instance, or switch MIG off on these GPUs",
        )
    ]


def shared_memory(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The kernels choose their tiles by the measured limit, down to that of SM120."""
    limits = {
        device["shared_memory_optin_bytes"]
        for device in section(facts, "torch").get("devices") or []
        if device.get("shared_memory_optin_bytes")
        # One that is refused for its capability needs no second refusal.
        and (nvidia.capability(device.get("capability")) or CAPABILITY_MIN) >= CAPABILITY_MIN
    }
    if not limits:
        return []
    least = min(limits)
    text = f"{least:,} bytes a block"
    if least < SHARED_MEMORY_LEAST:
        return [
            fault(
                "shared memory",
                f"{text}, the smallest kernel configuration needs up to {SHARED_MEMORY_LEAST:,}",
                "switch the verify kernels off with SGLANG_FORK_DISABLE=verify-attention",
            )
        ]
    if least == SHARED_MEMORY_LEAST:
        return [note("shared memory", f"{text}: the small tiles of SM120 are used")]
    return [ok("shared memory", text)]


def memory(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Memory of the host and of the GPUs, and the shared memory through which ranks meet."""
    host = section(facts, "host")
    findings = []
    free = host.get("available_bytes")
    if isinstance(free, int):
        text = f"{free / GIB:.1f} GiB free on the host, {host.get('cores')} cores"
        if mode == "cpu" and free < CPU_MEMORY_LEAST:
            findings.append(
                fault(
                    "memory",
                    f"{text}, a server's three processes alone need about 4 GiB",
                    "free memory, or raise the container's limit",
                )
            )
        else:
            findings.append(ok("memory", text))
    shm = host.get("shm_bytes")
    if isinstance(shm, int) and shm < SHM_LEAST and nvidia.count(facts) > 1:
        findings.append(
            warning(
                "memory",
                f"/dev/shm has {shm / GIB:.2f} GiB, ranks exchange buffers there and want {SHM_LEAST / GIB:.0f} GiB or more",
                "start the container with --shm-size 16g or --ipc host",
            )
        )
    return findings
