"""What the kernels must satisfy, as functions of a case and a device: run under the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from paged import Batch, Case, error, lse_error
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace

# Output tolerance (relative, Frobenius) by dtype; LSE is fp32 in every case.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
LSE_TOLERANCE = 2e-5


def tolerances(case: Case) -> tuple[float, float]:
    """(output, LSE) tolerance. Scores grow with the square of the input scale, and so does their rounding."""
    growth = max(1.0, case.scale**2)
    return max(TOLERANCE[case.dtype], 5e-7 * growth), LSE_TOLERANCE * growth


def with_target(plan: SplitPlan, target: int) -> SplitPlan:
    """``plan`` cut into about ``target`` splits, however short the context."""
    splits = replace(plan.splits, grain=16, min_keys=16)
    items = target + plan.request.batch - 1
    return replace(plan, target=target, items=items, splits=splits)


def cut(plan: SplitPlan, pieces: int) -> SplitPlan:
    """``plan`` with about ``pieces`` pieces, evened out, however short (exact for one request)."""
    splits = replace(plan.splits, grain=1, min_keys=1)
    return replace(plan, target=pieces, items=pieces + plan.request.batch - 1, splits=splits)


def accurate(batch: Batch, plan: SplitPlan | None = None, space: VerifyWorkspace | None = None) -> None:
    """Output and LSE of ``plan`` (by policy, if None) against float64; poison anywhere it must not look would show as NaN."""
    out, lse = batch.run(plan, space)
    want, want_lse = batch.expected()
    tolerance, lse_tolerance = tolerances(batch.case)
    assert error(out, want) < tolerance, (batch.case, error(out, want))
    assert lse_error(lse, want_lse) < lse_tolerance, (batch.case, lse_error(lse, want_lse))


def matches_oracle(case: Case, device: str) -> None:
    """``accurate`` for a case by itself."""
    accurate(Batch(case, device))


def padding_is_silent(case: Case, device: str) -> None:
    """Padding requests give zeros and -inf, whatever their table row holds, and change no other row."""
    batch = Batch(case, device)
    out, lse = batch.run()
    for b, length in enumerate(case.lengths):
        rows = slice(b * case.tokens, (b + 1) * case.tokens)
        if length == 0:
            assert not out[rows].any()
            assert torch.isneginf(lse[rows]).all()
        else:
            assert torch.isfinite(out[rows]).all()


def later_tokens_do_not_leak(case: Case, device: str) -> None:
    """Another last token leaves the rows before it bitwise equal, and changes its own."""
    batch = Batch(case, device)
    before, lse_before = batch.run()
    for b in range(len(case.lengths)):
        slot = batch.slots[b][-1:].to(device)
        fresh = torch.randn(1, batch.kv_heads, batch.dim_k, device=device).to(case.dtype)
        batch.k_pool[slot] = fresh
        if case.kind != "mla":
            batch.v_pool[slot] = fresh[..., : batch.dim_v].flip(-1)
    after, lse_after = batch.run()
    rows = torch.arange(before.shape[0], device=device)
    last = rows % case.tokens == case.tokens - 1
    assert torch.equal(before[~last], after[~last])
    assert torch.equal(lse_before[~last], lse_after[~last])
    assert not torch.equal(before[last], after[last])


def verify_equals_decode(case: Case, device: str) -> None:
    """Row i of a verify batch is a decode of one token at that position, within rounding."""
    batch = Batch(case, device)
    out, lse = batch.run()
    tolerance, lse_tolerance = tolerances(case)
    for t in range(case.tokens):
        lengths = tuple(n - case.tokens + t + 1 for n in case.lengths)
        single = Batch(replace(case, tokens=1, lengths=lengths, include_new=True), device)
        rows = torch.arange(len(lengths), device=device) * case.tokens + t
        single.q = batch.q[rows].contiguous()
        single.k_pool, single.v_pool = batch.k_pool, batch.v_pool
        single.table, single.req = batch.table, batch.req
        decoded, decoded_lse = single.run()
        assert error(decoded, out[rows].double()) < 2 * tolerance
        assert lse_error(decoded_lse, lse[rows].double()) < 2 * lse_tolerance


def repeats_are_equal(case: Case, device: str, targets: tuple[int, ...], repeats: int) -> None:
    """Bitwise equal repeats for every split count, and every split count right (aiter#4350, sglang#6101)."""
    batch = Batch(case, device)
    want, want_lse = batch.expected()
    tolerance, lse_tolerance = tolerances(case)
    for target in targets:
        plan = with_target(batch.plan(), target)
        space = batch.workspace(plan)
        first, first_lse = batch.run(plan, space)
        assert error(first, want) < tolerance, (target, error(first, want))
        assert lse_error(first_lse, want_lse) < lse_tolerance, target
        for _ in range(repeats):
            space.poison()
            again, again_lse = batch.run(plan, space)
            assert torch.equal(first, again) and torch.equal(first_lse, again_lse), target


def one_split_dominates(case: Case, device: str) -> None:
    """A key that outweighs all others by far, once in each part of the context: the merge must follow it."""
    batch = Batch(case, device)
    plan = with_target(batch.plan(), 8)
    tolerance, _ = tolerances(case)
    pristine = batch.k_pool.clone()
    length = case.lengths[0]
    for at in (0, length // 3, length - case.tokens):
        batch.k_pool.copy_(pristine)
        slot = batch.slots[0][at : at + 1].to(device)
        direction = batch.q[0, 0].float()
        batch.k_pool[slot] = (direction * (400.0 / float(direction.norm()))).to(case.dtype)
        if case.kind == "mla":
            batch.v_pool = batch.k_pool[..., : batch.dim_v]
        out, _ = batch.run(plan)
        want, _ = batch.expected()
        assert error(out, want) < tolerance, (at, error(out, want))


def lengths_may_change(case: Case, device: str, rounds: tuple[tuple[int, ...], ...]) -> None:
    """One plan and one workspace, tensors refilled in place with other lengths: equal to a fresh call."""
    longest = tuple(max(column) for column in zip(*rounds, strict=True))
    batch = Batch(replace(case, lengths=longest), device)
    plan = batch.plan(max(longest) + 7)
    space = batch.workspace(plan)
    new = 0 if case.include_new else case.tokens
    tolerance, _ = tolerances(case)
    slots = batch.slots
    for lengths in rounds:
        batch.seq_lens.copy_(torch.tensor([n - new for n in lengths]))
        batch.slots = [s[:n] for s, n in zip(slots, lengths, strict=True)]
        batch.case = replace(case, lengths=lengths)
        out, _ = batch.run(plan, space)
        want, _ = batch.expected()
        assert error(out, want) < tolerance, lengths
        fresh, _ = batch.run(plan)
        assert torch.equal(out, fresh)


def must_fail(check: Callable[[], None]) -> None:
    """A negative control: ``check`` must raise AssertionError."""
    try:
        check()
    except AssertionError:
        return
    raise RuntimeError("the negative control passed: the check does not see the fault it is there for")


# What every kernel in CUDA C++ promises beyond the oracle, at sizes for an emulated device.
CONTRACTS: dict[str, Callable[[], None]] = {
    "repeats are bitwise equal for every split count": lambda: repeats_are_equal(
        Case("b7", dtype=torch.bfloat16, lengths=(211,)), "cpu", (1, 2, 3, 5, 13), repeats=1
    ),
    "later tokens do not leak": lambda: later_tokens_do_not_leak(
        Case("leak", dtype=torch.bfloat16, lengths=(131, 5)), "cpu"
    ),
    "one split dominates": lambda: one_split_dominates(
        Case("b13", dtype=torch.bfloat16, lengths=(131,)), "cpu"
    ),
    "lengths may change": lambda: lengths_may_change(
        Case("graph", dtype=torch.bfloat16, lengths=(1, 1)), "cpu", ((130, 9), (3, 200), (66, 66))
    ),
}


def outstanding(batch: Batch, keep: int) -> Callable[[], None]:
    """Take away the queries and the last ``keep`` cache rows of each request; the result writes them, as a kernel in front would."""
    where = torch.cat([s[len(s) - keep :] for s in batch.slots])
    rows, q = batch.k_pool[where].clone(), batch.q.clone()
    batch.k_pool[where] = float("nan")
    batch.q.fill_(float("nan"))

    def write() -> None:
        batch.k_pool[where] = rows
        batch.q.copy_(q)

    return write
