"""Scratch for partial results, allocated once so that captured graphs never see it move."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.layers.attention.verify.plan import SplitPlan


class VerifyWorkspace:
    """Partial outputs and base-2 log-sum-exps (fp32) of every work item of every row.

    Size it for the largest plan of the process (``for_plans``). One workspace serves calls that run one after
    the other on one stream: all layers of a model share it. Graphs that may run concurrently need their own.
    Its contents carry nothing from one call to the next.
    """

    def __init__(
        self,
        partial_elements: int,
        lse_elements: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.partial = torch.empty(max(partial_elements, 1), dtype=dtype, device=device)
        self.lse = torch.empty(max(lse_elements, 1), dtype=torch.float32, device=device)

    @staticmethod
    def elements(plan: SplitPlan) -> tuple[int, int]:
        """(partial output elements, partial LSE elements) that ``plan`` needs."""
        r = plan.request
        rows = plan.items * r.tokens * r.q_heads
        return rows * r.v_dim, rows

    @classmethod
    def for_plans(cls, plans: Iterable[SplitPlan], device: torch.device | str) -> VerifyWorkspace:
        """Workspace that fits each of ``plans`` (they share it, they do not add up)."""
        sizes = [cls.elements(p) for p in plans]
        return cls(max((s[0] for s in sizes), default=1), max((s[1] for s in sizes), default=1), device)

    def check(self, plan: SplitPlan) -> None:
        """Raise ValueError when ``plan`` needs more than was allocated."""
        partial, lse = self.elements(plan)
        if partial > self.partial.numel() or lse > self.lse.numel():
            raise ValueError(
                f"workspace holds {self.partial.numel()} partial elements, plan needs {partial}; "
                "build it with VerifyWorkspace.for_plans over every plan in use"
            )
