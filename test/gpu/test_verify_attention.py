"""Verify attention on a device: accuracy, repeats, padding, graphs. Named after the reports they answer."""

from __future__ import annotations

from dataclasses import replace

import checks
import paged
import pytest
import torch
from cases import DEVICE
from paged import Batch, Case, error
from sglang.srt.layers.attention.verify import launch, stamps
from sglang.srt.layers.attention.verify.plan import device_traits, make_plan
from sglang.srt.layers.attention.verify.work_list import PassList

from benchmark.attention_trials import CHANGES, applies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
CHAIN = Case("chain", dtype=BF16, lengths=(1031, 67, 4099))
GQA = Case("gqa", kind="gqa", heads=8, kv_heads=2, dtype=BF16, lengths=(1031, 67))


def takes_either(case: Case) -> bool:
    """Whether the two launches in CUDA C++ are right for ``case``, or only those in Triton."""
    return case.kind == "mla" and not case.fp8 and case.mask == "none" and case.heads * case.tokens <= 32


@pytest.fixture(
    autouse=True, params=["always", "listed", "no"], ids=["cuda-cpp", "cuda-cpp-listed", "triton"]
)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check with both forms of two launches, at any batch, where both are right; in CUDA C++ also with a work list."""
    traits = device_traits()
    wanted = "no" if request.param == "no" else "always"
    case = request.node.callspec.params.get("case")
    if wanted == "always" and (traits.capability != (9, 0) or (case and not takes_either(case))):
        pytest.skip("the same kernels either way")
    monkeypatch.setattr(paged, "device_traits", lambda: replace(traits, warpgroup=wanted))
    if request.param == "listed":
        monkeypatch.setattr(Batch, "work", property(lambda batch: PassList()))


@pytest.mark.parametrize("case", DEVICE, ids=lambda c: c.name)
def test_oracle(case: Case) -> None:
    checks.matches_oracle(case, "cuda")


@pytest.mark.parametrize("case", [CHAIN, GQA, replace(CHAIN, fp8=True)], ids=("mla", "gqa", "fp8"))
def test_later_tokens_do_not_leak(case: Case) -> None:
    checks.later_tokens_do_not_leak(replace(case, fp8=False) if case.fp8 else case, "cuda")


@pytest.mark.parametrize(
    "case", [CHAIN, GQA, replace(CHAIN, fp8=True, k_scale=0.5)], ids=("mla", "gqa", "fp8")
)
def test_verify_row_equals_decode(case: Case) -> None:
    checks.verify_equals_decode(case, "cuda")


TRIED = Case("tried", dtype=BF16, lengths=(16411,))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_being_tried_is_right(name: str, tokens: int) -> None:
    batch = Batch(replace(TRIED, tokens=tokens), "cuda")
    plan = make_plan(batch.request, replace(batch.traits, fused="no", warpgroup="no"), 131072)
    if not applies(plan):
        pytest.skip("kernels of another architecture")
    plan = CHANGES[name](plan)
    first, _ = batch.run(plan)
    want, _ = batch.expected()
    assert error(first, want) < checks.TOLERANCE[BF16]
    assert torch.equal(first, batch.run(plan)[0])


@pytest.mark.parametrize("fused", ["no", "always"])
def test_a_traced_launch_gives_the_same_bits(fused: str) -> None:
    batch = Batch(TRIED, "cuda")
    plan = make_plan(batch.request, replace(batch.traits, fused=fused), 131072)  # type: ignore[arg-type]
    want, _ = batch.run(plan)
    out = torch.empty_like(want)
    programs = want.numel() // 32  # of the finest merge
    split, merge = (
        torch.full((n, stamps.WIDTH), -1, dtype=torch.int64, device="cuda") for n in (plan.items, programs)
    )
    x = launch.Operands(batch.q, batch.k_pool, batch.v_pool, out, None, (split, merge))
    launch.attend(plan, batch.workspace(plan), x, batch.context(), batch.sm_scale, 1.0, 1.0, 0.0, batch.work)
    assert torch.equal(out, want)
    assert int(split[:, stamps.FIELDS.index("work")].clamp(min=0).sum()) == TRIED.lengths[0]


def test_b5_padding_reads_nothing() -> None:
    checks.padding_is_silent(Case("padding", dtype=BF16, lengths=(0, 1031, 0, 5)), "cuda")


@pytest.mark.parametrize("length", [1024, 65536])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [8, 16])
def test_b7_repeats_are_bitwise_equal_for_every_split_count(length: int, tokens: int, heads: int) -> None:
    case = Case("b7", dtype=BF16, heads=heads, tokens=tokens, lengths=(length,))
    checks.repeats_are_equal(case, "cuda", (1, 2, 4, 8, 16, 32, 64), repeats=100)


def test_b13_one_split_dominates() -> None:
    checks.one_split_dominates(Case("b13", dtype=BF16, lengths=(4099,)), "cuda")


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_graph_replays_equal_eager_after_lengths_changed_by_100x(tokens: int, kind: str) -> None:
    """One captured graph; lengths and tables change in place between replays 1, 100 and 500."""
    rounds = ((300, 30000), (30011, 3), (8, 301))
    longest = tuple(max(column) for column in zip(*rounds, strict=True))
    case = Case("graph", kind=kind, heads=8, kv_heads=2, tokens=tokens, dtype=BF16, lengths=longest)
    batch = Batch(case, "cuda")
    plan = batch.plan(max(longest) + 7)
    space = batch.workspace(plan)
    rows = len(longest) * tokens
    out = torch.empty(rows, case.heads, batch.dim_v, dtype=BF16, device="cuda")
    lse = torch.empty(rows, case.heads, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch.launch(plan, space, out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.launch(plan, space, out, lse)
    slots = batch.slots
    replays = 0
    for target, lengths in zip((1, 100, 500), rounds, strict=True):
        batch.seq_lens.copy_(torch.tensor([n - tokens for n in lengths]))
        while replays < target:
            out.fill_(float("nan"))
            graph.replay()
            replays += 1
        eager, eager_lse = batch.run(plan)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse), (target, lengths)
        batch.slots = [s[:n] for s, n in zip(slots, lengths, strict=True)]
        batch.case = replace(case, lengths=lengths)
        want, _ = batch.expected()
        assert error(out, want) < checks.TOLERANCE[BF16], (target, lengths)


def test_padded_rows_of_a_graph_are_silent() -> None:
    """Captured for 4 requests, replayed with 1, 2 and 3 live ones (vllm#43682): live rows bitwise as alone."""
    case = Case("bucket", dtype=BF16, lengths=(1031, 67, 300, 5))
    batch = Batch(case, "cuda")
    plan = batch.plan()
    space = batch.workspace(plan)
    out = torch.empty(12, case.heads, batch.dim_v, dtype=BF16, device="cuda")
    batch.launch(plan, space, out, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.launch(plan, space, out, None)
    live_req = batch.req.clone()
    for live in (1, 2, 3):
        batch.req.copy_(torch.where(torch.arange(4, device="cuda") < live, live_req, -1))
        space.poison()
        out.fill_(float("nan"))
        graph.replay()
        assert not out[live * 3 :].any()
        want, _ = batch.expected()
        assert error(out[: live * 3], want[: live * 3]) < checks.TOLERANCE[BF16]
