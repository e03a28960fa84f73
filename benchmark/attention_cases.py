"""Cases of the attention benchmarks: a cache laid out as a model has it, and a call of the fork on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from attention_trials import Change, applies, warpgroup_applies
from sglang.srt.layers.attention.verify.admission import AttentionRequest
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.mla import mla_attention
from sglang.srt.layers.attention.verify.plan import SplitPlan, device_traits, make_plan
from sglang.srt.layers.attention.verify.table import Fused
from sglang.srt.layers.attention.verify.work_list import PassList
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace

LATENT, VALUE, HEADS = 576, 512, 8
L2_BYTES = 64 * 2**20
SM_SCALE = 0.1352337788608801 / 2

Call = Callable[[int], None]


class ForkCall:
    """A call of the fork on a layer. Those between two ``begin`` are one forward pass to it, however often it walks over the layers.

    ``listed``: they share a work list, as the layers of a model do; the first call's launch of it counts.
    """

    def __init__(self, attend: Callable[[int, PassList | None], None], listed: bool) -> None:
        self._attend, self._work = attend, PassList() if listed else None

    def begin(self) -> None:
        """A forward pass begins."""
        if self._work is not None:
            self._work.begin()

    def __call__(self, layer: int) -> None:
        """Attend."""
        self._attend(layer, self._work)


@dataclass(frozen=True)
class Case:
    """Shape of one measurement; ``context`` is the length before the new tokens."""

    tokens: int
    batch: int
    context: int
    fp8: bool


class Setup:
    """Tensors of one case: ``pools`` [layers, slots, 1, 576], one request table for all layers."""

    def __init__(self, case: Case, device: str, budget_bytes: int, max_context: int = 0) -> None:
        self.case, self.device = case, device
        self.length = case.context + case.tokens
        self.max_context = max(self.length, max_context)
        self.width = 1 if case.fp8 else 2
        need = case.batch * self.length
        slots = max(need + need // 4, 1024)
        layer = slots * LATENT * self.width
        used = need * LATENT * self.width
        layers = max(2, min(-(-2 * L2_BYTES // used), budget_bytes // layer, 160))
        self.layers = int(layers)
        gen = torch.Generator(device=device).manual_seed(17)
        self.pools = torch.empty(self.layers, slots, 1, LATENT, dtype=torch.bfloat16, device=device)
        for pool in self.pools:
            pool.normal_(generator=gen)
        if case.fp8:
            self.pools = torch.stack([p.to(torch.float8_e4m3fn).view(torch.uint8) for p in self.pools])
            self.pools = self.pools.view(torch.float8_e4m3fn)
        order = torch.randperm(slots, generator=gen, device=device)[:need]
        self.table = order.view(case.batch, self.length).to(torch.int32).contiguous()
        rows = case.batch * case.tokens
        self.q = torch.randn(rows, HEADS, LATENT, device=device, generator=gen).to(torch.bfloat16)
        self.out = torch.empty(rows, HEADS, VALUE, dtype=torch.bfloat16, device=device)
        self.bytes = case.batch * self.length * LATENT * self.width


# Traits that force a path where policy would choose: one launch, two in CUDA C++, two in Triton.
PATHS: dict[str, tuple[Fused, Fused]] = {
    "one-launch": ("always", "no"),
    "warpgroup": ("no", "always"),
    "two-launches": ("no", "no"),
}
# The same kernels where each block finds its work itself.
UNLISTED = {"warpgroup-unlisted": "warpgroup"}


def fork_plan(setup: Setup, path: str | None = None) -> SplitPlan:
    """The product's plan; ``path`` forces one of PATHS or UNLISTED."""
    case = setup.case
    traits = device_traits()
    if path is not None:
        fused, warpgroup = PATHS[UNLISTED.get(path, path)]
        traits = replace(traits, fused=fused, warpgroup=warpgroup)
    request = AttentionRequest(
        kind="mla",
        batch=case.batch,
        tokens=case.tokens,
        q_heads=HEADS,
        kv_heads=1,
        qk_dim=LATENT,
        v_dim=VALUE,
        q_dtype=torch.bfloat16,
        kv_dtype=setup.pools.dtype,
        capability=traits.capability,
    )
    return make_plan(request, traits, setup.max_context)


def fork_context(setup: Setup) -> KVContext:
    """Prefix lengths for verify, full lengths for decode, as the backend passes them."""
    case = setup.case
    decode = case.tokens == 1
    lens = torch.full((case.batch,), setup.length if decode else case.context, device=setup.device)
    return KVContext(
        seq_lens=lens,
        lens_include_new=decode,
        req_to_token=setup.table,
        req_pool_indices=torch.arange(case.batch, device=setup.device),
    )


def fork_call(setup: Setup, path: str | None = None, change: Change | None = None) -> tuple[Call, str]:
    """The product, or with ``change`` a plan that is only being tried."""
    plan = fork_plan(setup, path)
    if change is not None:
        if not (applies(plan) or warpgroup_applies(plan)):
            raise ValueError(f"nothing to try on {plan.reason}")
        plan = change(plan)
    space = VerifyWorkspace.for_plans([plan], setup.device)
    context = fork_context(setup)

    def attend(layer: int, work: PassList | None) -> None:
        mla_attention(
            setup.q, setup.pools[layer], setup.out, context, plan=plan, workspace=space, sm_scale=SM_SCALE, work=work
        )  # fmt: skip

    listed = path not in UNLISTED and plan.tile.kernel == "warpgroup"
    return ForkCall(attend, listed), plan.reason + (", work list" if listed else "")
