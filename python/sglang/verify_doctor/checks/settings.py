"""NCCL as loaded, its variables, and the allocator's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.facts.nccl import KNOWN
from sglang.verify_doctor.findings import Finding, note, ok, warning
from sglang.verify_doctor.versions import key


def nccl_version(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The NCCL that torch loads should be the one that its package brings."""
    loaded = section(facts, "torch").get("nccl")
    packaged = next(
        (
            v
            for n, v in (section(facts, "packages").get("installed") or {}).items()
            if n.startswith("nvidia-nccl") and v
        ),
        None,
    )
    if not loaded:
        return []
    if packaged and key(str(loaded)) != key(str(packaged)):
        return [
            warning(
                "nccl",
                f"{loaded} is loaded, but the installed package is {packaged}",
                "look for another libnccl.so.2 on LD_LIBRARY_PATH or LD_PRELOAD",
            )
        ]
    return [ok("nccl", f"{loaded} loaded")]


def nccl_variables(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Variables that are set, and those that NCCL would not read."""
    variables = section(facts, "environment")
    mine = {name: value for name, value in variables.items() if name.startswith("NCCL_")}
    findings = []
    for name in mine:
        if name in KNOWN:
            continue
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.75)
        if near:
            findings.append(
                warning("nccl", f"{name} is no variable that NCCL reads", f"did you mean {near[0]}?")
            )
    if mine:
        findings.append(
            note("nccl", "set: " + ", ".join(f"{name}={value}" for name, value in sorted(mine.items())))
        )
    if (
        str(mine.get("NCCL_P2P_DISABLE", "0")) == "1"
        and nvidia.farthest(section(facts, "nvidia").get("paths") or []) == "NV"
    ):
        findings.append(
            warning(
                "nccl",
                "NCCL_P2P_DISABLE=1 keeps NCCL from the NVLinks of this machine",
                "unset NCCL_P2P_DISABLE",
            )
        )
    return findings


def allocator(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Expandable segments cannot be shared between processes, which custom all-reduce needs."""
    variables = section(facts, "environment")
    if mode != "gpu":
        return []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in str(variables.get(name, "")) and nvidia.count(facts) > 1:
            return [
                warning(
                    "allocator",
                    f"{name} has expandable_segments:True, whose memory cannot be exported to other ranks",
                    f"remove it from {name}, or give --disable-custom-all-reduce",
                )
            ]
    return []
