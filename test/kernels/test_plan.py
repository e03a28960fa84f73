"""Admission, plan, workspace and the refusals that happen before anything is launched. No kernel runs here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import Batch, Case
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.admission import SHARED, AttentionRequest, admit
from sglang.srt.layers.attention.verify.binding import Binding, HeadShape, Scratch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.hooks import whole_device
from sglang.srt.layers.attention.verify.plan import DeviceTraits, by_batch, make_plan, planned_traits
from sglang.srt.layers.attention.verify.workspace import Needs, VerifyWorkspace

FUSED = DeviceTraits((9, 0), 132, fused="always")
H200, B200, RTX = DeviceTraits((9, 0), 132), DeviceTraits((10, 0), 148), DeviceTraits((12, 0), 188)
MLA = AttentionRequest("mla", 1, 3, 8, 1, 576, 512, torch.bfloat16, torch.bfloat16, (9, 0))
GQA = AttentionRequest("gqa", 1, 3, 32, 8, 128, 128, torch.bfloat16, torch.bfloat16, (9, 0))

REFUSED: tuple[tuple[str, AttentionRequest, str], ...] = (
    ("nine tokens", replace(MLA, tokens=9), "9 query tokens"),
    ("ragged", replace(MLA, ragged=True), "differ between requests"),
    ("not causal", replace(MLA, causal=False), "not causal"),
    ("window", replace(GQA, sliding_window=128), "sliding window"),
    ("sinks", replace(GQA, sinks=True), "sinks"),
    ("score mod", replace(GQA, score_mod=True), "score modifier"),
    ("temperature", replace(GQA, temperature_len=8192), "temperature"),
    ("e5m2", replace(MLA, kv_dtype=torch.float8_e5m2), "KV dtype"),
    ("mixed", replace(MLA, kv_dtype=torch.float16), "differs from query dtype"),
    ("heads", replace(GQA, q_heads=30), "30 query heads over 8"),
    ("ampere", replace(MLA, capability=(8, 0)), "needs 9.0"),
    ("two latent heads", replace(MLA, kv_heads=2), "2 latent heads"),
    ("small latent", replace(MLA, qk_dim=288, v_dim=256), "needs 576/512"),
    ("mla cap", replace(MLA, logit_cap=30.0), "logit cap"),
    ("b1 576 over 512 as gqa", replace(MLA, kind="gqa"), "key dim 576 differs"),
    ("head size", replace(GQA, qk_dim=80, v_dim=80), "head size 80"),
)


@pytest.mark.parametrize(
    ("request_", "reason"), [(r, why) for _, r, why in REFUSED], ids=[n for n, _, _ in REFUSED]
)
def test_refusals_name_their_reason(request_: AttentionRequest, reason: str) -> None:
    answer = admit(request_)
    assert not answer.ok and reason in answer.reason


@pytest.mark.parametrize(
    "request_", [MLA, GQA, replace(MLA, kv_dtype=torch.float8_e4m3fn), replace(MLA, mask="qlen")]
)
def test_admitted(request_: AttentionRequest) -> None:
    assert admit(request_).ok


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 256),
    tokens=st.integers(1, 8),
    heads=st.sampled_from([8, 16, 64, 128]),
    device=st.sampled_from([H200, FUSED, B200, RTX]),
    context=st.integers(1, 262_144),
)
def test_plans_are_bounded(batch: int, tokens: int, heads: int, device: DeviceTraits, context: int) -> None:
    """One program at least a request, rows covered, and scratch far below the cache it serves."""
    request = replace(MLA, batch=batch, tokens=tokens, q_heads=heads, capability=device.capability)
    plan = make_plan(request, device, context)
    assert plan.items >= batch
    assert plan.row_blocks * plan.tile.block_r >= request.rows
    assert plan.items <= max(2 * device.sm_count, batch + device.sm_count)
    needs = Needs.of(plan)
    assert needs.partial_bytes <= 2**30 and 4 * needs.packet_words <= 2**26 and needs.header_words <= 2**20
    if plan.tile.kernel == "fused":
        assert plan.items <= device.sm_count, "blocks that wait for each other must all be resident"
    assert str(device.sm_count) in plan.reason


@pytest.mark.parametrize(
    ("heads", "tokens", "padded"), [(5, 1, 8), (8, 1, 8), (5, 3, 16), (8, 3, 24), (5, 5, 32)]
)
def test_scratch_of_the_launches_in_cuda_has_the_rows_that_pad_a_tile(
    heads: int, tokens: int, padded: int
) -> None:
    request = replace(MLA, q_heads=heads, tokens=tokens)
    plan = make_plan(request, DeviceTraits((9, 0), 132, warpgroup="always"), 4096)
    assert plan.tile.kernel == "warpgroup"
    packets = WarpgroupVariant(plan.tile.block_r // 8, False).split_packets
    assert Needs.of(plan) == Needs(plan.items * packets * 16, plan.items * padded)


def test_policy_is_apart_from_admission() -> None:
    """What is right but unmeasured is admitted and not preferred: decode on sm_120; verify is."""
    decode = replace(MLA, tokens=1, capability=(12, 0))
    assert admit(decode).ok
    assert not make_plan(decode, RTX, 4096).use
    assert "not measured" in make_plan(decode, RTX, 4096).reason
    assert make_plan(replace(MLA, capability=(12, 0)), RTX, 4096).use
    assert make_plan(replace(MLA, tokens=1), H200, 4096).use


@pytest.mark.parametrize("device", [H200, B200, RTX], ids=["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("batch", [1, 8, 10, 64])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_draft_step_keeps_the_cycle_one_graph(kind: str, batch: int, device: DeviceTraits) -> None:
    """Whether or not the stock kernel would be the faster one: it is prepared outside its graph."""
    base = replace(GQA, q_heads=8) if kind == "gqa" else MLA
    decode = replace(base, tokens=1, batch=batch, capability=device.capability)
    assert make_plan(replace(decode, draft_step=True), device, 4096).use
    if kind == "gqa" and (batch > 8 or device is not H200):
        assert not make_plan(decode, device, 4096).use


def test_unknown_architecture_gets_the_generic_tile() -> None:
    plan = make_plan(replace(MLA, capability=(13, 0)), DeviceTraits((13, 0), 160), 4096)
    assert plan.reason.startswith("generic triton")


@pytest.mark.parametrize(
    ("setting", "warpgroup", "request_", "forms"),
    [
        ("auto", "auto", MLA, [(1, 64, "launches (CUDA C++)"), (96, 96, "(Triton")]),
        ("auto", "auto", replace(MLA, tokens=1), [(1, 64, "(CUDA C++)"), (96, 96, "(Triton")]),
        ("off", "on", MLA, [(1, 96, "split and merge launches (CUDA C++)")]),
        ("auto", "on", MLA, [(1, 96, "launches (CUDA C++)")]),
        ("auto", "auto", replace(MLA, tokens=5), [(1, 96, "(Triton, warp")]),
        ("auto", "off", MLA, [(1, 16, "split and merge"), (24, 64, "one launch"), (96, 96, "split")]),
        (
            "auto",
            "auto",
            replace(MLA, kv_dtype=torch.float8_e4m3fn),
            [(1, 2, "(Triton, warp"), (4, 64, "one launch"), (96, 96, "(Triton, warp")],
        ),
        (
            "auto",
            "on",
            replace(MLA, kv_dtype=torch.float8_e4m3fn, tokens=1),
            [(1, 2, "(Triton, warp"), (4, 64, "one launch"), (96, 96, "(Triton, warp")],
        ),
        ("off", "off", replace(MLA, tokens=1), [(1, 96, "(Triton, warp")]),
        ("off", "off", MLA, [(1, 96, "(Triton, warp")]),
        ("on", "auto", MLA, [(1, 64, "one launch"), (96, 96, "(Triton, warp")]),
        ("auto", "on", replace(GQA, tokens=1), [(1, 8, "split and merge"), (16, 96, "stock kernel")]),
    ],
)
def test_which_kernel_serves_which_batch(
    setting: str, warpgroup: str, request_: AttentionRequest, forms: list[tuple[int, int, str]]
) -> None:
    """What the doctor and a server say is the plan's own word, batch by batch."""
    device = planned_traits((9, 0), 132, setting, warpgroup)
    sizes = (1, 2, 4, 8, 16, 24, 32, 64, 96)
    found = by_batch(request_, device, 131_072, sizes)
    assert [(first, last) for first, last, _ in found] == [(first, last) for first, last, _ in forms]
    assert all(text in plan.form for (_, _, plan), (_, _, text) in zip(found, forms, strict=True))
    for size in sizes:
        plan = make_plan(replace(request_, batch=size), device, 131_072)
        (said,) = [named.form for first, last, named in found if first <= size <= last]
        assert plan.form == said
        assert (plan.tile.kernel == "fused") == (said.startswith("one launch"))
        assert (plan.tile.kernel == "warpgroup") == (said.startswith("split and merge launches (CUDA"))


def test_two_launches_do_not_serve_because_one_would_pay() -> None:
    """Where those in CUDA C++ cannot be built one launch takes large batches from those in Triton, but never from them."""
    request, both = replace(MLA, batch=32), planned_traits((9, 0), 132, "auto")
    assert make_plan(request, both, 4096).tile.kernel == "warpgroup"
    assert make_plan(request, replace(both, warpgroup="no"), 4096).tile.kernel == "fused"
    assert make_plan(request, replace(both, warpgroup="no", fused="no"), 4096).tile.kernel == "hopper"
    assert make_plan(request, replace(both, fused="always"), 4096).tile.kernel == "fused"


def test_the_kernels_asked_for_at_a_start_are_those_of_a_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that plans do take, so that what is compiled then is of use later."""
    asked: list[WarpgroupVariant] = []

    def loads(variant: WarpgroupVariant, device_index: int, path: str) -> bool:
        asked.append(variant)
        return True

    monkeypatch.setattr(fused_driver, "_loads", loads)
    assert fused_driver.warpgroup_available.__wrapped__(0)
    (variant,) = asked
    tile = make_plan(MLA, planned_traits((9, 0), 132, "auto"), 131_072).tile
    assert variant == WarpgroupVariant(
        tile.block_r // 8, False, listed=True, pace=tile.pace, stages=tile.num_stages
    )


def test_an_unmeasured_architecture_keeps_two_launches() -> None:
    assert planned_traits((12, 0), 188, "auto").fused == "no"
    assert planned_traits((12, 0), 188, "on").fused == "always"
    assert planned_traits((12, 0), 188, "auto", "on").warpgroup == "no", "it has no such instruction"
    assert planned_traits((10, 0), 148, "auto", "on").warpgroup == "no"


Break = Callable[[dict[str, Any]], None]


def _set(name: str, make: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(call: dict[str, Any]) -> None:
        call[name] = make(call)

    return apply


BROKEN: tuple[tuple[str, Break, str], ...] = (
    ("a10 q rows", _set("q", lambda c: c["q"][:-1]), "q is"),
    ("q heads", _set("q", lambda c: c["q"][:, :4]), "q is"),
    ("q dtype", _set("q", lambda c: c["q"].half()), "q is torch.float16"),
    ("latent width", _set("latent", lambda c: c["latent"][..., :512]), "k pool is"),
    ("latent dtype", _set("latent", lambda c: c["latent"].half()), "k pool is torch.float16"),
    ("out rows", _set("out", lambda c: c["out"][:-1]), "out is"),
    ("out strided", _set("out", lambda c: c["out"].repeat(1, 1, 2)[..., ::2]), "contiguous"),
    ("lse shape", _set("lse", lambda c: torch.zeros(1)), "lse is"),
    (
        "lens short",
        _set("context", lambda c: replace(c["context"], seq_lens=torch.zeros(1))),
        "seq_lens has 1",
    ),
    (
        "no pool indices",
        _set("context", lambda c: replace(c["context"], req_pool_indices=None)),
        "req_pool_indices",
    ),
    (
        "two addressings",
        _set("context", lambda c: replace(c["context"], kv_indices=torch.zeros(4))),
        "exactly one",
    ),
    (
        "mask not planned",
        _set("context", lambda c: replace(c["context"], tree_mask=torch.ones(64, dtype=torch.bool))),
        "mask layout",
    ),
    (
        "mask indptr alone",
        _set("context", lambda c: replace(c["context"], mask_indptr=torch.zeros(3))),
        "without",
    ),
    ("workspace", _set("workspace", lambda c: VerifyWorkspace(Needs(), "cpu")), "workspace holds"),
)


@pytest.mark.parametrize(("apply", "message"), [(b, m) for _, b, m in BROKEN], ids=[n for n, _, _ in BROKEN])
def test_mismatches_raise_before_anything_is_launched(
    apply: Break, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.attention.verify import launch, mla

    def launched(*args: object, **kwargs: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(launch, "attend_plain", launched)
    monkeypatch.setattr(launch.Launch, "run", launched)
    batch = Batch(Case("broken", lengths=(5, 9)))
    plan = batch.plan()
    call: dict[str, Any] = {
        "q": batch.q,
        "latent": batch.k_pool,
        "out": torch.empty(6, 8, 512),
        "context": batch.context(),
        "plan": plan,
        "workspace": batch.workspace(plan),
        "sm_scale": 1.0,
        "lse": None,
    }
    apply(call)
    with pytest.raises(ValueError, match=message):
        mla.mla_attention(**call)


def test_contexts_without_addressing_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        KVContext(torch.zeros(1), lens_include_new=True).check(1, 1)


def test_plain_path_on_a_cpu_matches_the_oracle() -> None:
    """Without Triton's interpreter the entry points still compute, slowly."""
    import checks

    for case in (
        Case("plain", lengths=(3, 65, 0)),
        Case("plain-gqa", kind="gqa", heads=8, kv_heads=2, dim=64, lengths=(65, 3), logit_cap=3.0),
        Case("plain-tree", mask="qlen", tokens=4, lengths=(65, 4)),
        Case("plain-full", mask="full", tokens=4, lengths=(65, 4)),
        Case("plain-include", include_new=True, lengths=(1, 2, 70)),
    ):
        checks.matches_oracle(case, "cpu")


@pytest.mark.parametrize("argument", SHARED)
def test_blocks_that_wait_for_each_other_have_the_device_to_themselves(argument: str) -> None:
    """Beside a kernel that waits for another rank, or on some multiprocessors only, one launch could wait for good."""
    fallbacks.reset()
    request = replace(MLA, batch=32)
    assert make_plan(request, whole_device(FUSED, SimpleNamespace()), 4096).tile.kernel == "fused"
    assert fallbacks.snapshot() == {}
    shared = whole_device(FUSED, SimpleNamespace(**{argument: True}))
    assert make_plan(request, shared, 4096).tile.kernel == "hopper"
    assert fallbacks.snapshot() == {"verify-fused": {SHARED[argument]: 1}}
    # Where the one launch is not in use anyway, nothing falls back.
    fallbacks.reset()
    assert whole_device(H200, SimpleNamespace(**{argument: True})) == H200
    assert fallbacks.snapshot() == {}


@pytest.mark.parametrize(
    ("step", "topk", "tokens", "expected"),
    [(0, 1, 1, True), (None, 1, 1, False), (1, 2, 1, False), (0, 1, 3, False)],
)
def test_only_a_step_of_a_chain_draft_asks_as_one(
    step: int | None, topk: int, tokens: int, expected: bool
) -> None:
    shape = HeadShape("gqa", 8, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    binding = Binding(H200, None, topk, 4096, torch.zeros(1, 1), Scratch("cpu"), shape, draft_step=step)
    request = binding.request(shape, 16, tokens)
    assert request.draft_step is expected
    plan = binding.decide(request)[1]
    assert plan is not None and plan.use is (expected or tokens > 1)
