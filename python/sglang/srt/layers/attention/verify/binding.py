"""What an attention backend keeps for the split-KV path: device facts, plans, scratch and capture records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.fork import counters, fallbacks
from sglang.srt.layers.attention.verify.admission import Admission, AttentionRequest, Kind, admit
from sglang.srt.layers.attention.verify.calls import Call, Refusal
from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan, make_plan, traits_of
from sglang.srt.layers.attention.verify.table import listing_pays
from sglang.srt.layers.attention.verify.work_list import PassList
from sglang.srt.layers.attention.verify.workspace import Needs, VerifyWorkspace

TOPIC = "verify-attention"
ATTRIBUTE = "fork_verify_binding"
# Triton's interpreter reports no multiprocessors; a few make the plans use several splits.
INTERPRETER_SM_COUNT = 4


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python (``TRITON_INTERPRET=1``)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def device_traits(device: torch.device | str) -> DeviceTraits | str:
    """Traits of ``device``, or the reason why no kernel of ours runs there."""
    kind = torch.device(device).type
    if kind == "cuda" and torch.version.hip is None:
        index = torch.device(device).index
        return traits_of(torch.cuda.current_device() if index is None else index)
    if kind == "cpu" and interpreting():
        return DeviceTraits((0, 0), INTERPRETER_SM_COUNT)
    return f"device {kind} (needs CUDA)"


class Scratch:
    """Hands out a workspace that fits, and keeps every one it ever handed out alive.

    Captured graphs hold raw addresses: a workspace that a graph was captured with must live as long as the
    graph, so growing allocates a new one beside it. Growing inside a capture is refused, because the memory
    would come from the graphs' shared pool and be reused by the next graph.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.current: VerifyWorkspace | None = None
        self.retired: list[VerifyWorkspace] = []

    def reserve(self, plans: Iterable[SplitPlan]) -> None:
        """Allocate for ``plans`` ahead of a capture, if what is there does not fit them."""
        needs = Needs.of_all(plans)
        if needs != Needs():
            self._at_least(needs)

    def fit(self, plan: SplitPlan) -> VerifyWorkspace | None:
        """A workspace for ``plan``; None when it would have to grow during a graph capture."""
        needs = Needs.of(plan)
        if self.current is not None and self.current.holds(needs):
            return self.current
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        return self._at_least(needs)

    def _at_least(self, needs: Needs) -> VerifyWorkspace:
        have = self.current
        if have is not None:
            if have.holds(needs):
                return have
            self.retired.append(have)
            needs = needs | have.capacity
        self.current = VerifyWorkspace(needs, self.device)
        return self.current


_graphs_read_table = False


def graphs_read_table() -> bool:
    """Whether any graph captured in this process reads the request table while it runs."""
    return _graphs_read_table


def _note_captured_read() -> None:
    global _graphs_read_table
    _graphs_read_table = True


@dataclass
class CaptureRecord:
    """How many attention calls of one captured shape each path took (warm-up runs included)."""

    ours: int = 0
    stock: int = 0

    @property
    def all_ours(self) -> bool:
        """Nothing in the graph reads the stock kernel's metadata."""
        return self.ours > 0 and self.stock == 0


@dataclass(frozen=True)
class HeadShape:
    """Head counts and sizes of the backend's ordinary layer, known before any layer has run."""

    kind: Kind
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass
class Binding:
    """State of one ``TritonAttnBackend``; its methods decide, count and remember, and launch nothing.

    ``refusal`` holds what makes every call of this backend stay on the stock path (None: served). ``current``
    is the call that upstream's forward method is making right now, as the replaced kernels see it. ``work`` is what the
    calls of the forward pass that is under way have in common.
    """

    traits: DeviceTraits | None
    refusal: str | None
    topk: int
    max_context: int
    req_to_token: torch.Tensor
    scratch: Scratch
    shape: HeadShape | None = None
    layers: int = 0
    work: PassList = field(default_factory=PassList)
    draft_step: int | None = None
    current: Call | None = None
    served: bool = False
    last_refusal: Refusal | None = None
    capturing: CaptureRecord | None = None
    captured: dict[tuple[str, int], CaptureRecord] = field(default_factory=dict)
    decisions: dict[AttentionRequest, tuple[Admission, SplitPlan | None]] = field(default_factory=dict)

    def decide(self, request: AttentionRequest) -> tuple[Admission, SplitPlan | None]:
        """Admission and, if admitted, the plan. Cached: both depend on nothing but the request."""
        found = self.decisions.get(request)
        if found is None:
            admission, plan = admit(request), None
            if admission.ok and self.traits is not None:
                plan = make_plan(request, self.traits, self.max_context)
            found = self.decisions[request] = (admission, plan)
        return found

    def work_for(self, mode: str) -> PassList | None:
        """Where calls of ``mode`` keep their work list; None where each finds its work itself.

        Draft steps do: their lengths are positions that advance in place from step to step.
        """
        return self.work if mode != "draft_decode" and listing_pays(self.layers) else None

    def plans_for(self, batches: Iterable[int], widths: Iterable[int]) -> list[SplitPlan]:
        """Plans of the ordinary layer at these batch sizes and query widths, to size the scratch with."""
        plans: list[SplitPlan] = []
        if self.shape is None or self.traits is None or self.refusal is not None:
            return plans
        widths = list(widths)
        for batch in batches:
            for tokens in widths:
                plan = self.decide(self.request(self.shape, batch, tokens))[1]
                if plan is not None and plan.use:
                    plans.append(plan)
        return plans

    def request(
        self, shape: HeadShape, batch: int, tokens: int, page_size: int = 1, **facts: Any
    ) -> AttentionRequest:
        """An admission request for ``shape``; ``facts`` are the fields that seldom differ from their default."""
        assert self.traits is not None
        return AttentionRequest(
            kind=shape.kind,
            batch=batch,
            tokens=tokens,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            q_dtype=shape.q_dtype,
            kv_dtype=shape.kv_dtype,
            capability=self.traits.capability,
            page_size=page_size,
            draft_step=tokens == 1 and self.draft_step is not None and self.topk == 1,
            **facts,
        )

    def count(self, mode: str, ours: bool) -> None:
        """Count one attention call of ``mode`` and note it in the capture that is under way."""
        counters.add("verify_attention_calls", mode=mode, path="fork" if ours else "stock")
        if self.capturing is not None:
            if ours:
                self.capturing.ours += 1
                _note_captured_read()
            else:
                self.capturing.stock += 1

    def refuse(self, refusal: Refusal) -> None:
        """Count a call that stays on the stock kernel, with its reason."""
        fallbacks.record(TOPIC, f"{refusal.mode}: {refusal.reason}", detail=refusal.detail)
        self.count(refusal.mode, ours=False)

    def begin_capture(self, mode: str, batch: int) -> None:
        """The next forward passes are captured for this mode and batch size."""
        self.capturing = self.captured.setdefault((mode, batch), CaptureRecord())

    def fully_ours(self, mode: str, batch: int) -> bool:
        """Whether the graph captured for this mode and batch size reads none of the stock metadata."""
        record = self.captured.get((mode, batch))
        return record is not None and record.all_ours
