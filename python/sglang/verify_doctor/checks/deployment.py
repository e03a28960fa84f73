"""The fork's topics, and the paths that will not be taken here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.checks.links import crosses_pcie
from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning


def topics(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Which topics are in force."""
    found = section(facts, "fork")
    if not found:
        return []
    if "error" in found:
        return [
            fault(
                "fork",
                str(found["error"]),
                "correct or unset SGLANG_FORK_DISABLE (`python -m sglang.fork` lists topics)",
            )
        ]
    if not found.get("composed"):
        return [
            fault(
                "fork",
                "this tree was not composed, so no topic is applied",
                "install the fork (`pip install .`), or run from build/composed after `make compose`",
            )
        ]
    groups: dict[str, list[str]] = {}
    for topic in found.get("topics") or []:
        groups.setdefault(topic["state"], []).append(topic["name"])
    findings = [
        ok(
            "fork",
            f"{found.get('version')} on sglang {found.get('base')}, applied: {', '.join(groups.get('applied', [])) or 'none'}",
        )
    ]
    if groups.get("off"):
        findings.append(
            warning(
                "fork",
                f"switched off: {', '.join(groups['off'])}",
                "unset SGLANG_FORK_DISABLE unless this is a comparison",
            )
        )
    if groups.get("not needed"):
        findings.append(note("fork", f"not needed on this base: {', '.join(groups['not needed'])}"))
    return findings


def fallbacks(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Fast paths that this machine cannot take, so that their counters are expected to move."""
    if mode == "cpu":
        return [
            note(
                "fallbacks",
                "on a CPU: no captured graphs, no overlap of host and device, attention in PyTorch",
            )
        ]
    findings = []
    if nvidia.count(facts) > 2 and crosses_pcie(facts):
        findings.append(
            note(
                "fallbacks",
                "without NVLink between all GPUs upstream's custom all-reduce refuses more than two ranks",
            )
        )
    return findings
