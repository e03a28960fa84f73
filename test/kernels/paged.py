"""Builds one paged batch: pools with poison everywhere no request may look, tables, lengths, and its oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oracle import attention_oracle, chain_visible, tree_visible
from sglang.srt.layers.attention.verify.admission import AttentionRequest
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.gqa import gqa_attention
from sglang.srt.layers.attention.verify.mla import mla_attention
from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan, device_traits, make_plan
from sglang.srt.layers.attention.verify.work_list import PassList
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace

POISON_SLOT = 2**31 - 1
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One attention call. ``lengths`` count the new tokens; a length of 0 is a padding request."""

    name: str
    kind: str = "mla"
    lengths: tuple[int, ...] = (65,)
    tokens: int = 3
    heads: int = 8
    kv_heads: int = 1
    dim: int = 128
    page: int = 1
    scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    logit_cap: float = 0.0
    mask: str = "none"
    include_new: bool = False
    indices: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0


# What every form in CUDA C++ runs on the emulated device; each adds what it alone has.
COMMON = (
    Case("lengths", dtype=torch.bfloat16, lengths=(3, 4, 67)),
    Case("padding", dtype=torch.bfloat16, lengths=(0, 131, 0, 5)),
    Case("several-blocks", dtype=torch.bfloat16, lengths=(397,)),
    Case("kv-indices-new", dtype=torch.bfloat16, indices=True, include_new=True, lengths=(3, 97)),
    Case("decode", dtype=torch.bfloat16, tokens=1, include_new=True, lengths=(1, 2, 130)),
)


class Batch:
    """Tensors of a ``Case`` on ``device``; ``run`` calls the product, ``expected`` the oracle.

    ``work`` goes along with each call: what the calls of a forward pass have in common.
    """

    work: PassList | None = None

    def __init__(self, case: Case, device: str = "cpu", traits: DeviceTraits | None = None) -> None:
        self.case = case
        self.device = device
        self.traits = traits or device_traits()
        mla = case.kind == "mla"
        self.dim_k, self.dim_v = (576, 512) if mla else (case.dim, case.dim)
        self.kv_heads = 1 if mla else case.kv_heads
        gen = torch.Generator().manual_seed(case.seed)
        batch = len(case.lengths)
        longest = max(*case.lengths, case.tokens, 1)
        pages = [-(-length // case.page) for length in case.lengths]
        total_pages = sum(pages) + 3
        slots = total_pages * case.page
        order = torch.randperm(total_pages, generator=gen)
        kv_dtype = FP8 if case.fp8 else case.dtype

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen) * case.scale

        def poisoned(width: int) -> torch.Tensor:
            pool = torch.full((slots, self.kv_heads, width), float("nan"))
            return pool

        k_pool = poisoned(self.dim_k)
        v_pool = k_pool if mla else poisoned(self.dim_v)
        table = torch.full((batch + 2, longest + 7), POISON_SLOT, dtype=torch.int32)
        self.req = (torch.randperm(batch, generator=gen) + 1).to(torch.int64)
        used = 0
        flat: list[torch.Tensor] = []
        for b, length in enumerate(case.lengths):
            mine = order[used : used + pages[b]]
            used += pages[b]
            where = (mine[:, None] * case.page + torch.arange(case.page)[None, :]).reshape(-1)[:length]
            table[self.req[b], :length] = where.to(torch.int32)
            flat.append(where)
            k_pool[where] = draw(length, self.kv_heads, self.dim_k)
            if not mla:
                v_pool[where] = draw(length, self.kv_heads, self.dim_v)
            if length == 0:
                self.req[b] = -1
        self.slots = flat
        self.k_pool = k_pool.to(kv_dtype).to(device)
        self.v_pool = self.k_pool[..., : self.dim_v] if mla else v_pool.to(kv_dtype).to(device)
        self.q = draw(batch * case.tokens, case.heads, self.dim_k).to(case.dtype).to(device)
        self.table = table.to(device)
        self.req = self.req.to(device)
        new = 0 if case.include_new else case.tokens
        self.seq_lens = torch.tensor(
            [max(n - new, 0) for n in case.lengths], dtype=torch.int64, device=device
        )
        self.sm_scale = self.dim_k**-0.5
        self.tree: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.mask_indptr: torch.Tensor | None = None
        if case.mask != "none":
            self._make_mask(gen)
        self.request = AttentionRequest(
            kind=case.kind,  # type: ignore[arg-type]
            batch=batch,
            tokens=case.tokens,
            q_heads=case.heads,
            kv_heads=self.kv_heads,
            qk_dim=self.dim_k,
            v_dim=self.dim_v,
            q_dtype=case.dtype,
            kv_dtype=kv_dtype,
            capability=self.traits.capability,
            mask=case.mask,  # type: ignore[arg-type]
            logit_cap=case.logit_cap,
            page_size=case.page,
        )

    def _make_mask(self, gen: torch.Generator) -> None:
        case, batch, tokens = self.case, len(self.case.lengths), self.case.tokens
        tree = torch.rand(batch, tokens, tokens, generator=gen) < 0.5
        tree |= torch.eye(tokens, dtype=torch.bool)
        self.tree = tree.tril()
        if case.mask == "qlen":
            self.mask = self.tree.reshape(-1).to(self.device)
            return
        parts, starts = [], [0]
        for b, length in enumerate(case.lengths):
            full = tree_visible(max(length, tokens), self.tree[b])
            parts.append(full.reshape(-1))
            starts.append(starts[-1] + full.numel())
        self.mask = torch.cat(parts).to(self.device)
        self.mask_indptr = torch.tensor(starts, dtype=torch.int64, device=self.device)

    def context(self) -> KVContext:
        """Addressing of the batch in the form the case asks for."""
        case = self.case
        common = {
            "seq_lens": self.seq_lens,
            "lens_include_new": case.include_new,
            "tree_mask": self.mask,
            "mask_indptr": self.mask_indptr,
        }
        if case.indices:
            starts = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32).to(self.device)
            return KVContext(kv_indptr=starts, kv_indices=torch.cat(self.slots).to(self.device), **common)
        return KVContext(req_to_token=self.table, req_pool_indices=self.req, **common)

    def plan(self, max_context: int | None = None) -> SplitPlan:
        """The product's own plan."""
        return make_plan(self.request, self.traits, max_context or int(self.table.shape[1]))

    def workspace(self, plan: SplitPlan) -> VerifyWorkspace:
        """Workspace full of NaN."""
        space = VerifyWorkspace.for_plans([plan], self.device)
        space.poison()
        return space

    def run(
        self, plan: SplitPlan | None = None, workspace: VerifyWorkspace | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the product, outputs poisoned beforehand."""
        case = self.case
        plan = plan or self.plan()
        workspace = workspace or self.workspace(plan)
        rows = len(case.lengths) * case.tokens
        out = torch.full((rows, case.heads, self.dim_v), float("nan"), dtype=case.dtype, device=self.device)
        lse = torch.full((rows, case.heads), float("nan"), device=self.device)
        self.launch(plan, workspace, out, lse)
        return out, lse

    def launch(
        self, plan: SplitPlan, workspace: VerifyWorkspace, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """One call of the product on tensors that stay where they are."""
        case = self.case
        if case.kind == "mla":
            mla_attention(
                self.q, self.k_pool, out, self.context(), plan=plan, workspace=workspace,
                sm_scale=self.sm_scale, k_scale=case.k_scale, lse=lse, work=self.work,
            )  # fmt: skip
        else:
            gqa_attention(
                self.q, self.k_pool, self.v_pool, out, self.context(), plan=plan, workspace=workspace,
                sm_scale=self.sm_scale, k_scale=case.k_scale, v_scale=case.v_scale,
                logit_cap=case.logit_cap, lse=lse,
            )  # fmt: skip

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the oracle in float64."""
        case = self.case
        outs, lses = [], []
        fp8 = self.k_pool.dtype == FP8
        k_scale = case.k_scale if fp8 else 1.0
        v_scale = (case.k_scale if case.kind == "mla" else case.v_scale) if fp8 else 1.0
        for b, length in enumerate(case.lengths):
            q = self.q[b * case.tokens : (b + 1) * case.tokens]
            where = self.slots[b].to(self.device)
            # fp8 has no indexing kernel on every device: index its bytes.
            k = self._rows(self.k_pool, where)
            v = k[..., : self.dim_v] if case.kind == "mla" else self._rows(self.v_pool, where)
            if self.tree is None or length == 0:
                visible = chain_visible(length, case.tokens)
            else:
                visible = tree_visible(length, self.tree[b])
            out, lse = attention_oracle(
                q,
                k.float() * k_scale,
                v.float() * v_scale,
                visible.to(self.device),
                self.sm_scale,
                case.logit_cap,
            )
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    @staticmethod
    def _rows(pool: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        if pool.dtype == FP8:
            return pool.view(torch.uint8)[where].view(FP8)
        return pool[where]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; inf when anything that should be finite is not."""
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def lse_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute LSE error; inf when the -inf rows differ."""
    dead = torch.isinf(want)
    if not torch.equal(dead, torch.isinf(got) & (got < 0)):
        return float("inf")
    return float((got.double() - want)[~dead].abs().max()) if (~dead).any() else 0.0
