"""Judgement: pure functions from facts to findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.verify_doctor.checks import (
    deployment,
    devices,
    kernels,
    links,
    machine,
    models,
    plan,
    settings,
    software,
)
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, warning
from sglang.verify_doctor.registry import Check, contributions

# Groups in the order of the report. What another part contributes comes last, under its own name.
GROUPS: dict[str, tuple[Check, ...]] = {
    "software": (software.python, software.pins, software.torch, software.kernels, software.missing),
    "machine": (
        devices.driver,
        devices.capability,
        devices.architectures,
        devices.partitions,
        devices.shared_memory,
        devices.memory,
        machine.parameters,
        machine.power,
        machine.clocks,
    ),
    "links": (
        links.topology,
        machine.fabric,
        machine.switches,
        machine.numa,
        links.iommu,
        links.acs,
        links.window,
        links.width,
    ),
    "settings": (settings.nccl_version, settings.nccl_variables, settings.allocator, settings.profile),
    "fork": (deployment.topics, kernels.attention, deployment.fallbacks),
    "model": (models.pair, models.memory),
    "deployment": (plan.resolution, plan.memory),
}


def serving(facts: Mapping[str, Any]) -> str:
    """What this machine is judged for when nothing is asked: ``gpu`` where there is any sign of one, else ``cpu``."""
    nvidia, torch = section(facts, "nvidia"), section(facts, "torch")
    return "gpu" if nvidia.get("tool") or nvidia.get("driver") or torch.get("devices") else "cpu"


def judge(facts: Mapping[str, Any], mode: str | None = None) -> list[Finding]:
    """Findings of every check, in the order of the report; ``mode`` is ``cpu`` or ``gpu``."""
    chosen = mode or serving(facts)
    others, broken = contributions()
    groups = GROUPS | {other.name: other.checks for other in others}
    found = [
        replace(finding, group=group)
        for group, checks in groups.items()
        for check in checks
        for finding in _asked(check, facts, chosen)
    ]
    return found + [replace(finding, group="doctor") for finding in broken]


def _asked(check: Check, facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """A check's findings. Facts from a file may be of any form: what one check stumbles over costs only that check."""
    try:
        return list(check(facts, mode))
    except Exception as error:
        name = f"{check.__module__.rpartition('.')[2]}.{getattr(check, '__name__', 'check')}"
        return [
            warning(
                "facts",
                f"{name} cannot judge them ({type(error).__name__}: {error}), so nothing is said about it",
                "record the facts again; if they are fresh, report this line",
            )
        ]
