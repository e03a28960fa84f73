"""NCCL as loaded, its variables, and the allocator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.verify_settings import catalogue, profiles
from sglang.srt.verify_settings.native import SET
from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning
from sglang.verify_doctor.versions import key

SHOWN = ("NCCL_", "TORCH_NCCL_", "CUDA_", "SGLANG_FORK_", "SGLANG_SPEC_")


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
    """Variables that are set, those that nobody would read, and values that cannot be meant."""
    variables = section(facts, "environment")
    files = section(facts, "settings", "conf")
    unread = section(facts, "settings").get("unread")
    if not isinstance(unread, Mapping):
        unread = catalogue.slips(variables, ())
    findings = [_unread(name, near, facts) for name, near in unread.items()]
    for name, value in {**files, **variables}.items():
        known = catalogue.declared().get(name)
        problem = known.problem(str(value)) if known and value and value != SET else None
        if known and problem:
            # A bad value of the fork's own ends the start; what others read, they read in their way.
            level = fault if name.startswith(catalogue.OWN_PREFIXES) else warning
            cure = f"correct it or unset it ({known.meaning.lower()})"
            findings.append(level("settings", f"{name}={value} {problem}", cure))
    mine = {name: value for name, value in variables.items() if name.startswith(SHOWN)}
    if mine:
        findings.append(
            note("settings", "set: " + ", ".join(f"{name}={value}" for name, value in sorted(mine.items())))
        )
    if files:
        names = ", ".join(f"{name}={value}" for name, value in sorted(files.items()))
        findings.append(note("settings", f"an NCCL configuration file adds: {names} (the environment wins)"))
    return findings + _p2p_off(facts, {**files, **variables})


def _unread(name: str, near: str | None, facts: Mapping[str, Any]) -> Finding:
    version = section(facts, "settings").get("nccl_version") or section(facts, "torch").get("nccl")
    reader = f"NCCL{f' {version}' if version else ''}" if name.startswith("NCCL_") else "the fork"
    return warning(
        "settings",
        f"{name} is set, but {reader} does not read it",
        f"did you mean {near}?" if near else "unset it; docs/settings.md lists what there is",
    )


def _p2p_off(facts: Mapping[str, Any], variables: Mapping[str, Any]) -> list[Finding]:
    if str(variables.get("NCCL_P2P_DISABLE", "0")) != "1":
        return []
    if nvidia.farthest(section(facts, "nvidia").get("paths") or []) != "NV":
        return []
    return [
        warning(
            "settings",
            "NCCL_P2P_DISABLE=1 keeps NCCL from the NVLinks of this machine",
            "unset NCCL_P2P_DISABLE",
        )
    ]


def profile(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The NCCL settings that fit this topology, for whoever wants a place to start from."""
    if mode != "gpu" or nvidia.count(facts) < 2:
        return []
    chosen, why = profiles.choose(profiles.links(facts))
    if chosen is None:
        return [note("profile", why)]
    values = " ".join(f"{name}={value.value}" for name, value in chosen.values.items())
    text = f"{chosen.name} fits ({why})" + (f": {values}" if values else "")
    return [note("profile", f"{text}; off unless asked for with {profiles.FLAG}")]


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
