"""The all-reduce kernels on one device: every rank is a stream of this process, or a process of its own.

No link is crossed here, so this shows that sums, orderings, waits and replays are right, and nothing about speed.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each rank's stream
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # a lazy load would wait for a rank that waits

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from one_shot_processes import run_processes
from sglang.srt.distributed.one_shot.buffers import Method
from sglang.srt.distributed.one_shot.cuda import CudaKernels, open_local_kernels
from sglang.srt.distributed.one_shot.errors import PeerTimeout
from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec, admit
from sglang.srt.distributed.one_shot.library import (
    WEAKEN_ANY_EPOCH,
    WEAKEN_DELAY_PUSH,
    WEAKEN_DELAY_READ,
    WEAKEN_FLAG_FIRST,
    WEAKEN_ONE_BUFFER,
    WEAKEN_TORN,
)
from sglang.srt.distributed.one_shot.protocol import Variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
LIMIT_S = 10.0
REPLAYS = int(os.environ.get("ONE_SHOT_REPLAYS", "10000"))


class Ranks:
    """All ranks of one process, each with its stream."""

    def __init__(self, ranks: int, max_blocks: int, defines: tuple[str, ...] = ()) -> None:
        spec = WorkspaceSpec(64, 8192, max_blocks)
        names = ("eager", "target", "draft", "preflight")
        self.kernels = open_local_kernels(ranks, DEVICE, dict.fromkeys(names, spec), defines=defines)
        self.streams = [torch.cuda.Stream(DEVICE) for _ in range(ranks)]

    def each(self, work: Callable[[CudaKernels], None]) -> None:
        """``work`` of every rank on its own stream, then wait for all and look at the error words."""
        torch.cuda.synchronize()
        for kernels, stream in zip(self.kernels, self.streams, strict=True):
            with torch.cuda.stream(stream):
                work(kernels)
        torch.cuda.synchronize()
        for kernels in self.kernels:
            kernels.check()


@contextmanager
def opened(ranks: int, max_blocks: int = 16, defines: tuple[str, ...] = ()) -> Iterator[Ranks]:
    group = Ranks(ranks, max_blocks, defines)
    try:
        yield group
    finally:
        torch.cuda.synchronize()
        for kernels in group.kernels:
            kernels.close()


def inputs(ranks: int, rows: int, hidden: int, dtype: torch.dtype, seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(ranks, rows, hidden, generator=generator, device=DEVICE).mul(scale).to(dtype)


def fits(variant: Variant, rows: int, hidden: int, ranks: int) -> bool:
    return admit(rows, hidden, torch.bfloat16, ranks, variant=variant).ok


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    total = x[0].float()
    for part in x[1:]:
        total = total + part.float()
    return total


SHAPES = [
    (1, 8),
    (1, 7168),
    (2, 264),
    (3, 7168),
    (5, 1000),
    (7, 4096),
    (13, 7168),
    (24, 7168),
    (47, 2048),
    (64, 8192),
]


@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_plain_sums_are_bitwise_those_of_the_fixed_order(
    ranks: int, dtype: torch.dtype, variant: Variant
) -> None:
    with opened(ranks, 32 if ranks == 2 else 8) as group:
        for turn, (rows, hidden) in enumerate(SHAPES * 2):
            if not fits(variant, rows, hidden, ranks):
                continue
            for kernels in group.kernels:  # threads of a CTA
                kernels.packet_shape = (0, 32, 64, 128, 256)[turn % 5]
            x = inputs(ranks, rows, hidden, dtype, turn, (1, 8, 50)[turn % 3])
            out = torch.full_like(x, float("nan"))
            group.each(
                lambda k, x=x, out=out: k.all_reduce(  # type: ignore[misc]
                    x[k.rank], out=out[k.rank], variant=variant, limit_s=LIMIT_S
                )
            )
            wanted = ordered_sum(x).to(dtype)
            for rank in range(ranks):
                assert torch.equal(out[rank], wanted), (rows, hidden, rank)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_fused_norm_against_float32_and_equal_on_all_ranks(
    ranks: int, variant: Variant, dependent: bool
) -> None:
    dtype, eps = torch.bfloat16, 1e-6
    with opened(ranks, 32 if ranks == 2 else 8) as group:
        for kernels in group.kernels:
            kernels.dependent_launch = dependent
        for turn, (rows, hidden) in enumerate(SHAPES):
            if not fits(variant, rows, hidden, ranks):
                continue
            for kernels in group.kernels:  # each shape of a row: 1 to 8 CTAs
                kernels.packet_shape = (0, 1, 2, 4, 8)[turn % 5]
            x = inputs(ranks, rows, hidden, dtype, turn, (1, 8, 50)[turn % 3])
            residual = (
                inputs(1, rows, hidden, dtype, 100 + turn, 4)[0].expand(ranks, rows, hidden).contiguous()
            )
            weight = (
                torch.ones(hidden, dtype=dtype, device=DEVICE)
                if turn % 2
                else inputs(1, 1, hidden, dtype, 7, 1)[0, 0]
            )
            total = ordered_sum(x)
            if variant is Variant.TWO_STAGE:
                total = total.to(dtype).float()
            h = total + residual[0].float()
            wanted = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
            # In place, which is how the layers call it.
            group.each(
                lambda k, x=x, r=residual, w=weight: k.all_reduce_rms_norm(  # type: ignore[misc]
                    x[k.rank],
                    r[k.rank],
                    w,
                    eps,
                    out=x[k.rank],
                    residual_out=r[k.rank],
                    variant=variant,
                    limit_s=LIMIT_S,
                )
            )
            for rank in range(ranks):
                assert torch.equal(residual[rank], h.to(dtype)), (rows, hidden, rank)
                assert torch.equal(x[rank], x[0])
            torch.testing.assert_close(x[0].float(), wanted, rtol=2**-7, atol=1e-5)


@dataclass
class Captured:
    """A graph, its count of wrong elements, and what it reads: a graph does not keep its inputs alive."""

    graph: torch.cuda.CUDAGraph
    wrong: torch.Tensor
    keep: tuple[torch.Tensor, ...]


def captured(kernels: CudaKernels, stream: torch.cuda.Stream, name: str, base: torch.Tensor) -> Captured:
    """A graph that draws new inputs, reduces them three ways and counts elements that are not as computed locally."""
    hidden = base.shape[-1]
    step = torch.zeros((), dtype=torch.int32, device=DEVICE)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=DEVICE)

    def work() -> None:
        step.add_(1)
        every = ((base + step * 7) % 251 - 125).to(torch.bfloat16)
        wanted = every.float().sum(0)  # small integers: exact in any order
        mine = every[kernels.rank].contiguous()
        out = kernels.all_reduce(mine, workspace=name)
        wrong.add_((out != wanted.to(torch.bfloat16)).sum())
        out = kernels.all_reduce(mine, workspace=name, variant=Variant.TWO_STAGE)
        wrong.add_((out != wanted.to(torch.bfloat16)).sum())
        out = kernels.all_reduce(mine, workspace=name, variant=Variant.PACKETS)
        wrong.add_((out != wanted.to(torch.bfloat16)).sum())
        h = wanted + every[0].float()
        exact = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        for variant in (Variant.PACKETS, Variant.ONE_SHOT):
            normed, residual = kernels.all_reduce_rms_norm(
                mine, every[0].contiguous(), weight, 1e-6, workspace=name, variant=variant
            )
            wrong.add_((residual != h.to(torch.bfloat16)).sum())
            wrong.add_(((normed.float() - exact).abs() > exact.abs() * 2**-7 + 1e-5).sum())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return Captured(graph, wrong, (base, step, weight))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sglang_29946_ten_thousand_replays_of_interleaved_workspaces(ranks: int) -> None:
    shapes = {"eager": 3, "target": 24, "draft": 1}
    with opened(ranks, 12) as group:
        graphs: dict[tuple[int, str], Captured] = {}
        torch.cuda.synchronize()
        for name, rows in shapes.items():
            generator = torch.Generator(DEVICE).manual_seed(rows)
            base = torch.randint(
                0, 251, (ranks, rows, 1024), generator=generator, device=DEVICE, dtype=torch.int32
            )
            for kernels, stream in zip(group.kernels, group.streams, strict=True):
                graphs[kernels.rank, name] = captured(kernels, stream, name, base)
        torch.cuda.synchronize()
        order = ["target", "eager", "draft", "draft", "target", "draft", "eager"]
        for turn in range(REPLAYS):
            name = order[turn % len(order)]
            for kernels, stream in zip(group.kernels, group.streams, strict=True):
                with torch.cuda.stream(stream):
                    graphs[kernels.rank, name].graph.replay()
            if turn % 64 == 63:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        assert {key: int(each.wrong) for key, each in graphs.items()} == dict.fromkeys(graphs, 0)


def race(
    weaken: int, slow_rank: int, variant: Variant = Variant.ONE_SHOT, limit_s: float = LIMIT_S
) -> tuple[int, list[PeerTimeout]]:
    """20 sums between a rank that reads late (or pushes late) and one that does not: wrong elements, failed waits."""
    with opened(2, 4, ("ONE_SHOT_RACE_TEST",)) as group:
        slow = group.kernels[slow_rank]
        slow.weaken, slow.delay_ns = weaken, 200_000
        group.kernels[1 - slow_rank].weaken = weaken & (WEAKEN_ONE_BUFFER | WEAKEN_ANY_EPOCH)
        x = (
            torch.arange(1, 41, device=DEVICE)
            .view(2, 20, 1, 1)
            .expand(2, 20, 1, 1024)
            .to(torch.bfloat16)
            .contiguous()
        )
        out = torch.zeros_like(x)
        torch.cuda.synchronize()
        for kernels, stream in zip(group.kernels, group.streams, strict=True):
            with torch.cuda.stream(stream):
                for turn in range(20):
                    kernels.all_reduce(
                        x[kernels.rank, turn], out=out[kernels.rank, turn], limit_s=limit_s, variant=variant
                    )
        torch.cuda.synchronize()
        failed = []
        for kernels in group.kernels:
            try:
                kernels.check()
            except PeerTimeout as error:
                failed.append(error)
        return int((out != (x[0] + x[1])).sum()), failed


@pytest.mark.parametrize("variant", [Variant.ONE_SHOT, Variant.PACKETS])
@pytest.mark.parametrize("weaken", [WEAKEN_DELAY_READ, WEAKEN_DELAY_PUSH])
def test_race_of_a_late_rank_is_right(weaken: int, variant: Variant) -> None:
    assert race(weaken, 0, variant) == (0, [])


def test_race_needs_the_second_buffer() -> None:
    wrong, failed = race(WEAKEN_DELAY_READ | WEAKEN_ONE_BUFFER, 0)
    assert wrong > 0 and not failed


def test_race_needs_data_before_its_flag() -> None:
    wrong, failed = race(WEAKEN_FLAG_FIRST, 1)
    assert wrong > 0 and not failed


def test_race_packets_need_the_second_buffer() -> None:
    """What was overwritten is not taken for this call's: its reader waits in vain, for the epoch before."""
    wrong, failed = race(WEAKEN_DELAY_READ | WEAKEN_ONE_BUFFER, 0, Variant.PACKETS, limit_s=0.5)
    assert wrong > 0 and failed
    assert any(error.seen > error.epoch for error in failed)


def test_race_packets_need_data_and_epoch_in_one_store() -> None:
    wrong, failed = race(WEAKEN_TORN, 1, Variant.PACKETS)
    assert wrong > 0 and not failed


def test_race_packets_need_their_own_epoch() -> None:
    wrong, failed = race(WEAKEN_ANY_EPOCH | WEAKEN_DELAY_PUSH, 1, Variant.PACKETS)
    assert wrong > 0 and not failed


@pytest.mark.parametrize("variant", list(Variant))
def test_rtx6kpro_21_a_withheld_flag_ends_the_wait_names_the_peer_and_gives_no_number(
    variant: Variant,
) -> None:
    with opened(3, 4) as group:
        x = torch.ones(3, 2, 1024, dtype=torch.bfloat16, device=DEVICE)
        out = torch.zeros_like(x)
        first = Variant.PACKETS if variant is Variant.PACKETS else Variant.ONE_SHOT
        group.each(lambda k: k.all_reduce(x[k.rank], out=out[k.rank], variant=first, limit_s=LIMIT_S))
        torch.cuda.synchronize()
        start = time.monotonic()
        for rank in (0, 1):  # rank 2 stays away
            with torch.cuda.stream(group.streams[rank]):
                group.kernels[rank].all_reduce(x[rank], out=out[rank], variant=variant, limit_s=0.5)
        torch.cuda.synchronize()
        assert 0.4 < time.monotonic() - start < 5.0
        for rank in (0, 1):
            with pytest.raises(
                PeerTimeout, match=f"rank {rank} waited for rank 2 and ran out of time"
            ) as caught:
                group.kernels[rank].check()
            # Flags hold the last epoch; of packets the second epoch's buffer has not been used before.
            assert caught.value.epoch == 2
            assert caught.value.seen == (0 if variant is Variant.PACKETS else 1)
            assert bool(out[rank].isnan().all())
            with pytest.raises(PeerTimeout):
                group.kernels[rank].all_reduce(x[rank])
        group.kernels[2].check()


@pytest.mark.parametrize("variant", list(Variant))
def test_abort_ends_a_wait_without_a_limit(variant: Variant) -> None:
    with opened(2, 4) as group:
        x = torch.ones(1, 1024, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty_like(x)
        timer = threading.Timer(0.5, group.kernels[0].abort)
        timer.start()
        with torch.cuda.stream(group.streams[0]):
            group.kernels[0].all_reduce(x, out=out, variant=variant)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeout, match="rank 0 waited for rank 1 and was aborted by the host"):
            group.kernels[0].check()


def test_pairs_through_the_same_kernel_and_the_owner_sees_the_pattern() -> None:
    with opened(4, 4) as group:
        x = torch.stack(
            [torch.full((1, 1024), r + 1.0, dtype=torch.bfloat16, device=DEVICE) for r in range(4)]
        )
        out = torch.zeros_like(x)
        for channel, (a, b) in enumerate([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]):
            for rank in (a, b):
                with torch.cuda.stream(group.streams[rank]):
                    group.kernels[rank].all_reduce(
                        x[rank], out=out[rank], workspace="preflight", members=(b, a), limit_s=LIMIT_S
                    )
            torch.cuda.synchronize()
            for rank in (a, b):
                group.kernels[rank].check()
                assert bool((out[rank] == a + b + 2).all())
            seen = group.kernels[a].slot_bytes("preflight", 4 + channel, 1, b, 2048)
            assert seen == x[b].cpu().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("method", [Method.IPC, Method.FILE_DESCRIPTORS])
@pytest.mark.parametrize("expandable", [False, True])
def test_vllm_42609_processes_share_buffers(method: Method, expandable: bool) -> None:
    results = run_processes(2, method.name, expandable)
    assert results == ["ok", "ok"], results
