"""The fallback to plain decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.findings import Finding, ok
from sglang.verify_doctor.registry import Contribution


def mode(state: Mapping[str, Any]) -> list[Finding]:
    """Whether a running server decodes plainly at times."""
    found = dict(state.get("speculative_auto") or {})
    if not found:
        return []
    text = ", ".join(
        f"{name} {value}" for name, value in found.items() if isinstance(value, (str, int, float))
    )
    return [ok("fallback to decode", text)]


CONTRIBUTION = Contribution(
    name="speculative-auto",
    deployment="sglang.verify_doctor.deployment.parts:speculative_auto",
    server=mode,
)
