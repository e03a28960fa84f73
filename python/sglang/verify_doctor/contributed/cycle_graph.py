"""The whole cycle as one graph."""

from __future__ import annotations

from sglang.verify_doctor.registry import Contribution

CONTRIBUTION = Contribution(
    name="cycle-graph",
    deployment="sglang.verify_doctor.deployment.parts:cycle_graph",
)
