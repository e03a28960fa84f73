"""Judgement: pure functions from facts to findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang.verify_doctor.checks import deployment, devices, links, models, settings, software
from sglang.verify_doctor.findings import Finding

Check = Callable[[Mapping[str, Any], str], list[Finding]]

ALL: tuple[Check, ...] = (
    software.python,
    software.pins,
    software.torch,
    software.kernels,
    software.missing,
    devices.driver,
    devices.capability,
    devices.architectures,
    devices.partitions,
    devices.shared_memory,
    devices.memory,
    links.topology,
    links.iommu,
    links.acs,
    links.window,
    links.width,
    settings.nccl_version,
    settings.nccl_variables,
    settings.allocator,
    deployment.topics,
    deployment.fallbacks,
    models.pair,
    models.memory,
)


def serving(facts: Mapping[str, Any]) -> str:
    """What this machine is judged for when nothing is asked: ``gpu`` where there is any sign of one, else ``cpu``."""
    nvidia = facts.get("nvidia") or {}
    torch = facts.get("torch") or {}
    return "gpu" if nvidia.get("tool") or nvidia.get("driver") or torch.get("devices") else "cpu"


def judge(facts: Mapping[str, Any], mode: str | None = None) -> list[Finding]:
    """Findings of every check, in the order of the report; ``mode`` is ``cpu`` or ``gpu``."""
    chosen = mode or serving(facts)
    return [finding for check in ALL for finding in check(facts, chosen)]
