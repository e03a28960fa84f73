"""Scratch for partial results, allocated once so that captured graphs never see it move."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.layers.attention.verify.plan import SplitPlan


class VerifyWorkspace:
    """Partial outputs and base-2 log-sum-exps (fp32) of every work item of every row.

    Size it for the largest plan of the process (``for_plans``). One workspace serves calls that run one after
    the other on one stream: all layers of a model share it. Graphs that may run concurrently need their own.
    Its contents carry nothing from one call to the next. ``bytes`` is raw: plans differ in element type.
    """

    def __init__(self, partial_bytes: int, lse_elements: int, device: torch.device | str) -> None:
        # Whole lines, so that every element type finds itself aligned.
        self.bytes = torch.empty(-(-max(partial_bytes, 1) // 128) * 128, dtype=torch.uint8, device=device)
        self.lse = torch.empty(max(lse_elements, 1), dtype=torch.float32, device=device)

    @staticmethod
    def needs(plan: SplitPlan) -> tuple[int, int]:
        """(bytes of partial outputs, partial LSE elements) of ``plan``."""
        r = plan.request
        rows = plan.items * r.tokens * r.q_heads
        return rows * r.v_dim * plan.partial_dtype.itemsize, rows

    @classmethod
    def for_plans(cls, plans: Iterable[SplitPlan], device: torch.device | str) -> VerifyWorkspace:
        """Workspace that fits each of ``plans`` (they share it, they do not add up)."""
        sizes = [cls.needs(p) for p in plans]
        return cls(max((s[0] for s in sizes), default=1), max((s[1] for s in sizes), default=1), device)

    def partial_of(self, plan: SplitPlan) -> torch.Tensor:
        """The partial outputs in the element type of ``plan``."""
        return self.bytes.view(plan.partial_dtype)

    def poison(self) -> None:
        """Fill with NaN of every element type: for tests, results must not depend on what is in here."""
        self.bytes.fill_(0xFF)
        self.lse.fill_(float("nan"))

    def check(self, plan: SplitPlan) -> None:
        """Raise ValueError when ``plan`` needs more than was allocated."""
        partial, lse = self.needs(plan)
        if partial > self.bytes.numel() or lse > self.lse.numel():
            raise ValueError(
                f"workspace holds {self.bytes.numel()} bytes of partial results, plan needs {partial}; "
                "build it with VerifyWorkspace.for_plans over every plan in use"
            )
