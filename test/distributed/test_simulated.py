"""Simulated peers: sums, order of summation, odd sizes, both variants, and what a lost flag or a dead rank does."""

from __future__ import annotations

import threading
import time
from itertools import combinations

import pytest
import torch
from sglang.srt.distributed.one_shot.errors import PeerTimeout, Unsupported
from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec, admit, packet_bytes
from sglang.srt.distributed.one_shot.protocol import Kind, Safety, Step, Variant, reached
from sglang.srt.distributed.one_shot.simulated import Fabric, SimulatedKernels, spawn_threads

SPECS = {name: WorkspaceSpec(8, 256) for name in ("eager", "target", "draft", "preflight")}
VARIANTS = list(Variant)


def inputs(ranks: int, rows: int, hidden: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, hidden, generator=generator).mul(8).to(dtype) for _ in range(ranks)]


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_are_those_of_the_fixed_order_on_every_rank(ranks: int, variant: Variant) -> None:
    fabric = Fabric(ranks, SPECS)
    rounds = [(rows, hidden, dtype) for rows in (1, 3, 7) for hidden in (8, 136, 256) for dtype in (torch.bfloat16, torch.float16)]  # fmt: skip

    def work(rank: int) -> list[torch.Tensor]:
        kernels = SimulatedKernels(fabric, rank)
        return [
            kernels.all_reduce(inputs(ranks, rows, hidden, n, dtype)[rank], variant=variant)
            for n, (rows, hidden, dtype) in enumerate(rounds)
        ]

    results = spawn_threads(ranks, work)
    for n, (rows, hidden, dtype) in enumerate(rounds):
        wanted = ordered_sum(inputs(ranks, rows, hidden, n, dtype)).to(dtype)
        for result in results:
            assert torch.equal(result[n], wanted)  # type: ignore[index]


def test_fused_norm_in_place_and_interleaved_workspaces() -> None:
    ranks, eps = 2, 1e-6
    fabric = Fabric(ranks, SPECS)
    names = ["eager", "target", "draft", "draft", "eager", "eager", "target"]

    def work(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        kernels = SimulatedKernels(fabric, rank)
        results = []
        for n, name in enumerate(names):
            x = inputs(ranks, 3, 136, n, torch.bfloat16)[rank]
            residual, weight = inputs(2, 3, 136, 100 + n, torch.bfloat16)
            results.append(
                kernels.all_reduce_rms_norm(
                    x, residual, weight[0].contiguous(), eps, out=x, residual_out=residual, workspace=name
                )
            )
        return results

    for result in spawn_threads(ranks, work):
        for n in range(len(names)):
            residual, weight = inputs(2, 3, 136, 100 + n, torch.bfloat16)
            hidden = ordered_sum(inputs(ranks, 3, 136, n, torch.bfloat16)) + residual.float()
            normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps) * weight[0].float()
            torch.testing.assert_close(result[n][0], normed.bfloat16())  # type: ignore[index]
            assert torch.equal(result[n][1], hidden.bfloat16())  # type: ignore[index]


def test_rtx6kpro_21_a_lost_flag_ends_the_wait_with_both_names() -> None:
    fabric = Fabric(3, SPECS)
    others_done = threading.Barrier(3, timeout=60)

    def lose(step: Step) -> bool:
        return not (step.kind is Kind.PUBLISH and step.peer == 0 and step.epoch == 2)

    def last(step: Step) -> bool:
        if step.kind is Kind.AWAIT and step.epoch == 2 and not waited:
            waited.append(others_done.wait())
        return True

    waited: list[int] = []

    def work(rank: int) -> None:
        kernels = SimulatedKernels(fabric, rank, intercept={0: last, 1: None, 2: lose}[rank])
        for limit_s in (60.0, 60.0 if rank else 0.5):
            kernels.all_reduce(torch.ones(1, 8, dtype=torch.bfloat16), limit_s=limit_s)
        kernels.check()
        others_done.wait()

    results = spawn_threads(3, work)
    assert isinstance(results[0], PeerTimeout)
    assert (results[0].rank, results[0].peer, results[0].epoch, results[0].seen) == (0, 2, 2, 1)
    assert "rank 0 waited for rank 2" in str(results[0])
    assert results[1] is None and results[2] is None


def test_a_dead_rank_is_named_by_all_others_and_a_late_one_is_waited_for() -> None:
    fabric = Fabric(3, SPECS)
    living = threading.Barrier(2, timeout=60)

    def work(rank: int) -> torch.Tensor:
        def together(step: Step) -> bool:
            if step.kind is Kind.AWAIT and step.epoch == 2 and not met:
                met.append(living.wait())  # both have told each other all they had to
            return True

        met: list[int] = []
        kernels = SimulatedKernels(fabric, rank, intercept=together)
        if rank == 1:
            time.sleep(0.3)
        first = kernels.all_reduce(torch.ones(1, 8, dtype=torch.bfloat16), limit_s=60.0)
        if rank == 1:
            return first
        kernels.all_reduce(first, limit_s=0.5)
        raise AssertionError("the second sum cannot be complete")

    results = spawn_threads(3, work)
    assert torch.equal(results[1], torch.full((1, 8), 3.0, dtype=torch.bfloat16))  # type: ignore[arg-type]
    for rank in (0, 2):
        error = results[rank]
        assert isinstance(error, PeerTimeout) and error.peer == 1


def test_abort_ends_an_unbounded_wait_and_poisons_the_workspace() -> None:
    fabric = Fabric(2, SPECS)
    kernels = SimulatedKernels(fabric, 0)
    x = torch.ones(1, 8, dtype=torch.bfloat16)

    def work(rank: int) -> None:
        if rank == 0:
            kernels.all_reduce(x)
        time.sleep(0.2)
        kernels.abort()

    error = spawn_threads(2, work)[0]
    assert isinstance(error, PeerTimeout) and error.aborted
    with pytest.raises(PeerTimeout):
        kernels.all_reduce(x)


def test_pairs_have_channels_of_their_own() -> None:
    ranks = 4
    fabric = Fabric(ranks, SPECS)

    def work(rank: int) -> dict[tuple[int, int], float]:
        kernels = SimulatedKernels(fabric, rank)
        sums = {}
        for pair in combinations(range(ranks), 2):
            if rank in pair:
                x = torch.full((1, 8), float(rank + 1), dtype=torch.bfloat16)
                sums[pair] = float(kernels.all_reduce(x, workspace="preflight", members=pair)[0, 0])
        x = torch.full((1, 8), float(rank + 1), dtype=torch.bfloat16)
        assert float(kernels.all_reduce(x, workspace="preflight")[0, 0]) == 10.0
        with pytest.raises(Unsupported):
            kernels.all_reduce(x, members=(0, 1))
        return sums

    for result in spawn_threads(ranks, work):
        for (a, b), value in result.items():  # type: ignore[union-attr]
            assert value == a + b + 2


REFUSED = {
    "float32": (dict(rows=1, hidden=64, dtype=torch.float32, ranks=2), "float32"),
    "odd hidden": (dict(rows=1, hidden=63, dtype=torch.bfloat16, ranks=2), "multiple of 8"),
    "hidden 4": (dict(rows=1, hidden=4, dtype=torch.bfloat16, ranks=2), "multiple of 8"),
    "too wide": (dict(rows=1, hidden=8200, dtype=torch.bfloat16, ranks=2), "limit"),
    "too many rows": (dict(rows=65, hidden=64, dtype=torch.bfloat16, ranks=2), "rows"),
    "no rows": (dict(rows=0, hidden=64, dtype=torch.bfloat16, ranks=2), "no rows"),
    "one rank": (dict(rows=1, hidden=64, dtype=torch.bfloat16, ranks=1), "ranks"),
    "nine ranks": (dict(rows=1, hidden=64, dtype=torch.bfloat16, ranks=9), "ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sglang_v100_2_refusals_are_sentences(name: str) -> None:
    call, words = REFUSED[name]
    admission = admit(**call)  # type: ignore[arg-type]
    assert not admission and words in admission.reason


def test_a_view_that_is_not_contiguous_is_refused_before_anything_is_sent() -> None:
    kernels = SimulatedKernels(Fabric(2, SPECS), 0)
    x = torch.ones(4, 32, dtype=torch.bfloat16)[:, :16]
    with pytest.raises(Unsupported, match="contiguous"):
        kernels.all_reduce(x)
    with pytest.raises(Unsupported, match="aligned"):
        kernels.all_reduce(torch.ones(33, dtype=torch.bfloat16)[1:].view(1, 32))


def test_a_flag_is_reached_at_its_epoch_and_one_ahead() -> None:
    assert reached(5, 5) and reached(6, 5) and not reached(4, 5)
    # What two days of one-shot calls leave of a flag that only two-stage calls set.
    old, now = 7, 7 + 2**31 + 1
    assert not reached(old, now) and reached(old, now, 32)


@pytest.mark.parametrize(("bits", "right"), [(64, True), (4, False)])
def test_a_second_stage_after_many_one_shot_calls(bits: int, right: bool) -> None:
    """Flags of 4 bits wrap after 8 calls as flags of 32 do after 2**31: the late share is not waited for."""
    fabric, size = Fabric(2, SPECS), 64
    read = threading.Event()

    def late(step: Step) -> bool:
        if step.stage == 1 and step.kind is Kind.PUSH:
            read.wait(0.2 if right else 60)  # who does not wait has read by then; who does never will
        return True

    def work(rank: int) -> torch.Tensor:
        kernels = SimulatedKernels(
            fabric, rank, safety=Safety(flag_bits=bits), intercept=late if rank else None
        )
        x = torch.full((1, size), float(rank + 1), dtype=torch.bfloat16)
        for _ in range(9):
            kernels.all_reduce(x, limit_s=60.0)
        found = kernels.all_reduce(x, variant=Variant.TWO_STAGE, limit_s=60.0)
        if rank == 0:
            read.set()
        return found

    first, second = spawn_threads(2, work)
    assert bool((first == 3).all()) is right  # type: ignore[attr-defined]
    assert bool((second == 3).all())  # type: ignore[attr-defined]


def test_a_lost_packet_ends_the_wait_with_both_names() -> None:
    fabric = Fabric(2, SPECS)

    def lose(step: Step) -> bool:
        return not (step.kind is Kind.PUSH and step.epoch == 2)

    def work(rank: int) -> None:
        kernels = SimulatedKernels(fabric, rank, intercept=lose if rank else None)
        for limit_s in (60.0, 60.0 if rank else 0.5):
            x = torch.ones(1, 8, dtype=torch.bfloat16)
            kernels.all_reduce(x, limit_s=limit_s, variant=Variant.PACKETS)

    error, other = spawn_threads(2, work)
    assert isinstance(error, PeerTimeout) and other is None
    # Epoch 2 is the first of its buffer: nothing was there before.
    assert (error.rank, error.peer, error.epoch, error.seen) == (0, 1, 2, 0)


@pytest.mark.parametrize("own_epoch", [True, False])
def test_what_an_earlier_call_left_is_not_taken_for_this_calls(own_epoch: bool) -> None:
    """The third call finds the first one's packets in its buffer; whoever takes any epoch adds them up."""
    fabric, read = Fabric(2, SPECS), threading.Event()

    def late(step: Step) -> bool:
        if step.kind is Kind.PUSH and step.epoch == 3:
            read.wait(0.2 if own_epoch else 60)  # who does not wait has read by then; who does never will
        return True

    def work(rank: int) -> list[float]:
        kernels = SimulatedKernels(
            fabric, rank, safety=Safety(own_epoch=own_epoch), intercept=late if rank else None
        )
        found = []
        for turn in range(3):
            x = torch.full((1, 8), float((turn + 1) * 4**rank), dtype=torch.bfloat16)
            found.append(float(kernels.all_reduce(x, limit_s=60.0, variant=Variant.PACKETS)[0, 0]))
        if rank == 0:
            read.set()
        return found

    first, second = spawn_threads(2, work)
    assert second == [5.0, 10.0, 15.0]
    assert first == ([5.0, 10.0, 15.0] if own_epoch else [5.0, 10.0, 3.0 + 4.0])


def test_packets_have_less_room_and_serve_all_ranks_only() -> None:
    fits = {ranks: packet_bytes(ranks) // (2 * 7168) for ranks in (2, 4, 8)}
    assert fits == {2: 73, 4: 24, 8: 10}
    for ranks, rows in fits.items():
        shape = {"hidden": 7168, "dtype": torch.bfloat16, "ranks": ranks}
        if rows < 64:
            assert admit(rows=rows, variant=Variant.PACKETS, **shape)
            assert admit(rows=rows + 1, **shape)
            assert "too large for packets" in admit(rows=rows + 1, variant=Variant.PACKETS, **shape).reason
        else:
            assert admit(rows=64, variant=Variant.PACKETS, **shape)
