"""Recommended NCCL settings by topology. Off unless asked for, and never in place of what the user set.

Each value has its reason and its source. None of them was measured by this project on the machines that it is
for: a profile is a place to start a comparison from, and the bench rows name the one that was on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.verify_settings.catalogue import nearest
from sglang.srt.verify_settings.declare import SettingError

OFF, AUTO = "off", "auto"
VARIABLE = "SGLANG_FORK_NCCL_PROFILE"
FLAG = "--nccl-profile"
_GUIDE = "NVIDIA's NCCL guide, environment variables"
_FIELD = "a published deployment of Kimi-K2.5 on 8x RTX PRO 6000 (February 2026)"
_FIELD_WHY = "part of that deployment's set; its verify time did not change with any of it"


@dataclass(frozen=True)
class Value:
    """One recommended value."""

    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class Profile:
    """``when`` says for which machines it is meant; an empty ``values`` means that NCCL's own choice stands."""

    name: str
    when: str
    values: Mapping[str, Value] = field(default_factory=dict)


def _level(value: str, reason: str) -> dict[str, Value]:
    return {"NCCL_P2P_LEVEL": Value(value, reason, _GUIDE)}


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("nvlink", "every pair of GPUs is joined by NVLink"),
        Profile(
            "pcie-switch",
            "GPUs below PCIe switches: the farthest two meet in a switch",
            _level(
                "PXB",
                "every pair here meets in a switch, so all of them may write to each other directly; NCCL's own choice "
                "depends on the processor",
            ),
        ),
        Profile(
            "pcie-one-socket",
            "GPUs below one processor: some pairs meet in its host bridges",
            _level(
                "NODE",
                "lets pairs below different host bridges of one socket write to each other directly; where a platform "
                "does not route that, the first all-reduce hangs (rtx6kpro#15), so run the preflight first",
            ),
        ),
        Profile(
            "pcie-two-sockets",
            "some pairs of GPUs are below different processors",
            _level(
                "NODE",
                "keeps direct writes inside a socket: across the link between sockets they are slowest and hang on "
                "some platforms (rtx6kpro#15); data that crosses goes through host memory",
            ),
        ),
        Profile(
            "pcie-no-p2p",
            "direct writes are known to fail: the IOMMU translates, ACS redirects, or the driver denies them",
            {
                "NCCL_P2P_DISABLE": Value(
                    "1",
                    "peer writes hang or reach the wrong memory until the cause is removed",
                    "rtx6kpro#15, nccl#2079, nccl#2338",
                )
            },
        ),
        Profile(
            "field-report",
            "to compare with one published deployment, by name only",
            {
                name: Value(value, _FIELD_WHY, _FIELD)
                for name, value in (
                    ("NCCL_PROTO", "LL"),
                    ("NCCL_ALGO", "Ring"),
                    ("NCCL_P2P_LEVEL", "SYS"),
                    ("NCCL_MAX_NCHANNELS", "16"),
                    ("NCCL_BUFFSIZE", "16777216"),
                    ("NCCL_NTHREADS", "512"),
                )
            },
        ),
    )
}


@dataclass(frozen=True)
class Links:
    """What the choice depends on. ``farthest`` is NV, PIX, PXB, PHB, NODE, SYS, or None for one GPU; ``strange`` are
    words for a path that we do not know."""

    farthest: str | None
    strange: tuple[str, ...] = ()
    translation: bool = False
    redirecting: bool = False
    denied: bool = False


def links(facts: Mapping[str, Any]) -> Links:
    """The same from the doctor's facts."""
    from sglang.verify_doctor.facts import host, nvidia, pci

    machine, found = dict(facts.get("host") or {}), dict(facts.get("nvidia") or {})
    virtual = "hypervisor" in ((machine.get("cpu") or {}).get("features") or [])
    state = host.iommu_state(machine.get("iommu_parameters") or {}, machine.get("iommu_groups") or {})
    return Links(
        farthest=nvidia.farthest(found.get("paths") or []),
        strange=tuple(nvidia.strange(found.get("paths") or [])),
        translation=state == "translation" and not virtual,
        redirecting=bool(pci.redirecting((facts.get("pci") or {}).get("devices") or [])),
        denied=bool(nvidia.denied(found)),
    )


def choose(found: Links) -> tuple[Profile | None, str]:
    """The profile for a machine, with the reason; None where there is nothing to recommend."""
    if found.strange:
        # Which of two paths is the farther one is not known, and a wrong level can hang the first all-reduce.
        words = ", ".join(found.strange)
        return (
            None,
            f"the driver calls a path between two GPUs {words}, which is not known here: nothing to recommend",
        )
    if found.farthest is None:
        return None, "one GPU, or no matrix of paths: nothing to recommend"
    if found.farthest == "NV":
        return PROFILES["nvlink"], "every pair is joined by NVLink: NCCL's own choices stand"
    causes = [
        text
        for text, holds in (
            ("the IOMMU translates addresses", found.translation),
            ("ACS redirects peer traffic", found.redirecting),
            ("the driver denies peer access", found.denied),
        )
        if holds
    ]
    if causes:
        return PROFILES["pcie-no-p2p"], " and ".join(causes)
    name = {"PIX": "pcie-switch", "PXB": "pcie-switch", "SYS": "pcie-two-sockets"}.get(
        found.farthest, "pcie-one-socket"
    )
    return PROFILES[name], f"the farthest pair is {found.farthest}"


def named(name: str) -> Profile:
    """A profile by its name.

    Raises:
        SettingError: there is none of that name.
    """
    if name in PROFILES:
        return PROFILES[name]
    near = nearest(name, PROFILES, cutoff=0.6)
    hint = f"did you mean {near}? " if near else ""
    raise SettingError(f"{FLAG} {name} is no profile; {hint}There are {OFF}, {AUTO}, {', '.join(PROFILES)}")


def markdown() -> str:
    """A table of the profiles, for docs/settings.md."""
    lines = ["| profile | for | sets | why | source |", "| --- | --- | --- | --- | --- |"]
    for profile in PROFILES.values():
        values = list(profile.values.items())
        if not values:
            lines.append(f"| `{profile.name}` | {profile.when} | nothing | NCCL's own choices stand | - |")
            continue
        text = "<br>".join(f"`{name}={entry.value}`" for name, entry in values)
        first = values[0][1]
        lines.append(f"| `{profile.name}` | {profile.when} | {text} | {first.reason} | {first.source} |")
    return "\n".join(lines) + "\n"
