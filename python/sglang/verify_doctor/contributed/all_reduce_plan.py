"""Who will reduce in a deployment."""

from __future__ import annotations

from sglang.verify_doctor.registry import Contribution

CONTRIBUTION = Contribution(
    name="one-shot all-reduce, plan",
    deployment="sglang.verify_doctor.deployment.parts:one_shot",
)
