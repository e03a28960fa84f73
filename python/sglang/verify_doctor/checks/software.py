"""Interpreter, package versions, torch and the compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning
from sglang.verify_doctor.versions import key, satisfies

PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)
CPU_LOCK = "requirements/cpu.txt"

# A wrong version of one of these breaks the start; of the others it may break a feature.
CORE = frozenset({"torch", "transformers", "triton", "xgrammar"})
CORE_GPU = frozenset({"flashinfer-python", "sglang-kernel"})
# What serving imports on a CPU; the wheel asks for much more, most of it for GPUs.
_CPU_NEEDS = """
    aiohttp apache-tvm-ffi compressed-tensors dill einops fastapi gguf ipython msgspec numpy openai orjson
    partial-json-parser pillow psutil pybase64 pydantic python-multipart pyzmq requests sentencepiece setproctitle
    soundfile torch torchvision transformers triton uvicorn uvloop xgrammar
"""
CPU_NEEDS = frozenset(_CPU_NEEDS.split())


def python(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The interpreter must be one that the wheel is built for."""
    text = str(section(facts, "python").get("version", ""))
    have = key(text)
    if have is None:
        return []
    limits = f"{PYTHON_MIN[0]}.{PYTHON_MIN[1]} to {PYTHON_END[0]}.{PYTHON_END[1] - 1}"
    if PYTHON_MIN <= have[0][:2] < PYTHON_END:
        return [ok("python", text)]
    return [
        fault(
            "python",
            f"{text}, but the fork is built for {limits}",
            f"make a virtual environment with Python {limits}",
        )
    ]


def pins(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Installed versions against what sglang and torch ask for, each deviation with its pair named."""
    packages = section(facts, "packages")
    rows = packages.get("pins") or []
    owners = packages.get("owners") or {}
    if not owners.get("sglang"):
        return [
            fault(
                "packages",
                "no installed sglang, so there are no pins to hold the packages to",
                "install the fork (`pip install .` in its repository)",
            )
        ]
    core = CORE | CORE_GPU if mode == "gpu" else CORE
    findings = []
    kept = 0
    for row in rows:
        if row["installed"] is None or not row["specifier"]:
            continue
        if satisfies(row["installed"], row["specifier"]) is not False:
            kept += 1
            continue
        owner = f"{row['owner']} {owners.get(row['owner'])}"
        found = (
            f"{row['name']} {row['installed']} with {owner}, which asks for {row['name']}{row['specifier']}"
        )
        if row["name"] == "torch" and mode == "gpu":
            found += "; the compiled kernels are built against that torch and fail with an undefined symbol on another"
        cure = f"pip install '{row['name']}{row['specifier']}'"
        make = fault if row["name"] in core else warning
        findings.append(make("packages", found, cure))
    if not findings and kept:
        findings.append(ok("packages", f"{kept} installed packages are of the versions asked for"))
    return findings


def torch(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Torch must load."""
    found = section(facts, "torch")
    if "error" in found:
        error = str(found["error"])
        if "No module named 'torch'" in error:
            return [fault("torch", "not installed", _torch_cure(facts))]
        return [fault("torch", f"does not load: {error}", _torch_cure(facts))]
    if not found:
        return []
    if mode == "gpu" and not found.get("cuda") and not found.get("hip"):
        return [
            fault(
                "torch",
                f"{found.get('version')} is a build for CPUs",
                f"{_torch_cure(facts)} (PyPI's build for Linux is the CUDA one)",
            )
        ]
    parts = [str(found.get("version"))]
    if found.get("cuda"):
        parts.append(f"built for CUDA {found['cuda']}")
    if mode == "cpu":
        parts.append(f"{found.get('threads')} threads, {found.get('cpu_capability')}")
    return [ok("torch", ", ".join(parts))]


def _torch_cure(facts: Mapping[str, Any]) -> str:
    rows = section(facts, "packages").get("pins") or []
    wanted = next(
        (row["specifier"] for row in rows if row["name"] == "torch" and row["owner"] == "sglang"), ""
    )
    return f"pip install --force-reinstall 'torch{wanted}'"


def kernels(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Whether the compiled kernels load, and if not, whether the portable ones stand in for them."""
    found = section(facts, "kernels")
    if not found or "present" not in found:
        return []
    real = found.get("present") and found.get("loads") and not found.get("is_portable")
    if real:
        return [ok("kernels", f"compiled sgl_kernel {found.get('version') or ''}".rstrip())]
    reason = "sgl_kernel is not installed"
    if found.get("present") and not found.get("loads"):
        reason = f"sgl_kernel does not load: {found.get('error')}"
    if mode == "gpu":
        wanted = next(
            (
                r["specifier"]
                for r in section(facts, "packages").get("pins") or []
                if r["name"] == "sglang-kernel"
            ),
            "",
        )
        return [
            fault(
                "kernels",
                f"{reason}, and GPU serving needs it",
                f"pip install --force-reinstall 'sglang-kernel{wanted}'",
            )
        ]
    if found.get("portable") or found.get("is_portable"):
        why = f" ({reason})" if found.get("present") and not found.get("loads") else ""
        return [ok("kernels", f"portable CPU operations stand in for sgl_kernel{why}")]
    return [
        fault(
            "kernels",
            f"{reason}, and there are no portable operations",
            "install the fork, which brings them along",
        )
    ]


def missing(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Packages that serving in this mode imports and that are not there."""
    rows = section(facts, "packages").get("pins") or []
    # Torch itself has a finding of its own.
    absent = sorted({row["name"] for row in rows if row["installed"] is None} - {"torch"})
    if mode == "gpu":
        needed = [name for name in absent if name in CORE | CORE_GPU]
        others = [name for name in absent if name not in needed]
    else:
        needed = [name for name in absent if name in CPU_NEEDS]
        others = []
    findings = []
    if needed:
        cure = (
            "pip install the fork again, with its dependencies"
            if mode == "gpu"
            else f"pip install -r {CPU_LOCK}"
        )
        findings.append(fault("packages", f"missing for {mode} serving: {', '.join(needed)}", cure))
    if others:
        findings.append(
            warning(
                "packages",
                f"asked for and not installed: {', '.join(others)}",
                "pip install the fork with its dependencies",
            )
        )
    if mode == "cpu":
        gpu_only = [name for name in absent if name in CORE_GPU]
        if gpu_only:
            findings.append(
                note("packages", f"not installed and needed on a GPU only: {', '.join(gpu_only)}")
            )
    return findings
