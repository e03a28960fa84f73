"""Scratch for partial results, allocated once so that captured graphs never see it move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.verify.plan import SplitPlan


@dataclass(frozen=True)
class Needs:
    """Sizes of a workspace: partial outputs, partial log-sum-exps, and what blocks of one launch hand each other."""

    partial_bytes: int = 0
    lse_elements: int = 0
    packet_words: int = 0
    header_words: int = 0

    def __or__(self, other: Needs) -> Needs:
        """Enough for either."""
        return Needs(
            max(self.partial_bytes, other.partial_bytes),
            max(self.lse_elements, other.lse_elements),
            max(self.packet_words, other.packet_words),
            max(self.header_words, other.header_words),
        )

    @property
    def total_bytes(self) -> int:
        """All of it together."""
        return self.partial_bytes + 4 * (self.lse_elements + self.packet_words + self.header_words)

    @staticmethod
    def of(plan: SplitPlan) -> Needs:
        """What ``plan`` needs."""
        r = plan.request
        rows = r.tokens * r.q_heads
        if plan.tile.kernel == "fused":
            return Needs(0, 0, plan.items * rows * r.v_dim // 2, plan.items * (plan.items + rows))
        if plan.tile.kernel == "warpgroup":
            # Results leave as the matrix instructions have them: with the rows that pad the last tile of eight.
            rows = plan.tile.block_r
        return Needs(plan.items * rows * r.v_dim * plan.partial_dtype.itemsize, plan.items * rows)

    @staticmethod
    def of_all(plans: Iterable[SplitPlan]) -> Needs:
        """What the largest of ``plans`` needs (they share it, they do not add up)."""
        total = Needs()
        for plan in plans:
            total = total | Needs.of(plan)
        return total


class VerifyWorkspace:
    """Partial results of every work item of every row; base-2 log-sum-exps are fp32.

    Size it for the largest plan of the process (``for_plans``). One workspace serves calls that run one after
    the other on one stream: all layers of a model share it. Graphs that may run concurrently need their own.

    ``bytes`` (raw: plans differ in element type) and ``lse`` carry nothing from one call to the next. ``packets`` and
    ``headers`` (int32) belong to the one-launch kernel, whose blocks wait for each other's words: every word is -1
    between launches, and each launch leaves it so.
    """

    def __init__(self, needs: Needs, device: torch.device | str) -> None:
        # Whole lines, so that every element type finds itself aligned.
        self.bytes = torch.empty(
            -(-max(needs.partial_bytes, 1) // 128) * 128, dtype=torch.uint8, device=device
        )
        self.lse = torch.empty(max(needs.lse_elements, 1), dtype=torch.float32, device=device)
        self.packets = torch.full((max(needs.packet_words, 4),), -1, dtype=torch.int32, device=device)
        self.headers = torch.full((max(needs.header_words, 1),), -1, dtype=torch.int32, device=device)

    @classmethod
    def for_plans(cls, plans: Iterable[SplitPlan], device: torch.device | str) -> VerifyWorkspace:
        """Workspace that fits each of ``plans``."""
        return cls(Needs.of_all(plans), device)

    @property
    def capacity(self) -> Needs:
        """What this workspace has room for."""
        return Needs(self.bytes.numel(), self.lse.numel(), self.packets.numel(), self.headers.numel())

    def holds(self, needs: Needs) -> bool:
        """Whether it is large enough for ``needs``."""
        return self.capacity | needs == self.capacity

    def partial_of(self, plan: SplitPlan) -> torch.Tensor:
        """The partial outputs in the element type of ``plan``."""
        return self.bytes.view(plan.partial_dtype)

    def poison(self) -> None:
        """Fill what carries nothing with NaN of every element type: for tests."""
        self.bytes.fill_(0xFF)
        self.lse.fill_(float("nan"))

    def check(self, plan: SplitPlan) -> None:
        """Raise ValueError when ``plan`` needs more than was allocated."""
        needs = Needs.of(plan)
        if not self.holds(needs):
            raise ValueError(
                f"workspace holds {self.capacity}, plan needs {needs}; "
                "build it with VerifyWorkspace.for_plans over every plan in use"
            )
