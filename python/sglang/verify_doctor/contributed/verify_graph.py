"""The graph policy: what is captured, and what a running server captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.findings import Finding, ok
from sglang.verify_doctor.registry import Contribution


def captured(state: Mapping[str, Any]) -> list[Finding]:
    """Graphs of a running server, and steps that found none."""
    found = dict(state.get("verify_graph") or {})
    findings = [
        ok(
            "graphs",
            f"{kind}: sizes {' '.join(map(str, item['sizes']))}, {item['bytes'] / (1 << 20):.0f} MiB, {item['seconds']:.1f} s",
        )
        for kind, item in dict(found.get("captured") or {}).items()
    ]
    if found.get("policy"):
        findings.insert(0, ok("graph policy", str(found["policy"])))
    return findings


CONTRIBUTION = Contribution(
    name="verify-graph",
    deployment="sglang.verify_doctor.deployment.parts:verify_graph",
    server=captured,
)
