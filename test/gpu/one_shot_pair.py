"""One rank of two on a GPU of its own: sums against NCCL in float32, and replays of interleaved graphs.

``python one_shot_pair.py RANK RANKS STORE REPLAYS``; the last line is ``ok`` or what is wrong.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

HIDDEN = 7168
# Odd row counts, and the payloads of sglang-V100#2: 16 B, 14,336, 43,008, 131,072 and 393,216 bytes.
SHAPES = [(rows, HIDDEN) for rows in (1, 3, 5, 7, 13, 47, 63)] + [(1, 8), (8, 8192), (24, 8192)]
EPS = 1e-6


def against_nccl(kernels: Any, nccl: Any, device: torch.device) -> int:
    """Elements that differ from NCCL's float32 sum, rounded once; for more than two ranks NCCL's order is another."""
    from sglang.srt.distributed.one_shot.kernels import admit
    from sglang.srt.distributed.one_shot.protocol import Variant

    wrong, ranks = torch.zeros((), dtype=torch.int64, device=device), kernels.world_size
    for turn, (shape, variant, dtype) in enumerate(
        (shape, variant, dtype)
        for shape in SHAPES
        for variant in Variant
        for dtype in (torch.bfloat16, torch.float16)
        if admit(*shape, dtype, kernels.world_size, variant=variant)
    ):
        torch.manual_seed(turn * ranks + kernels.rank)
        x = torch.randn(shape, device=device).mul((1, 8, 50)[turn % 3]).to(dtype)
        wanted = x.float()
        dist.all_reduce(wanted, group=nccl)
        got = kernels.all_reduce(x, variant=variant, limit_s=10.0)
        residual, weight = torch.full_like(x, 0.5), torch.full_like(x[0], 2.0)
        normed, kept = kernels.all_reduce_rms_norm(x, residual, weight, EPS, variant=variant, limit_s=10.0)
        h = (wanted.to(dtype).float() if variant is Variant.TWO_STAGE else wanted) + 0.5
        exact = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * 2.0
        far = (normed.float() - exact).abs() > exact.abs() * 2**-7 + 1e-5
        if ranks == 2:
            wrong += (got != wanted.to(dtype)).sum() + (kept != h.to(dtype)).sum()
        else:
            wrong += ((got.float() - wanted).abs() > wanted.abs() * 2**-7 + 2**-7).sum()
        wrong += far.sum()
    torch.cuda.synchronize(device)
    kernels.check()
    return int(wrong)


class Captured:
    """A graph with new inputs in every replay; it counts elements that are not as computed here from all inputs."""

    def __init__(self, kernels: Any, name: str, rows: int, device: torch.device) -> None:
        from sglang.srt.distributed.one_shot.protocol import Variant

        generator = torch.Generator(device).manual_seed(rows)
        ranks = kernels.world_size
        self.base = torch.randint(0, 251, (ranks, rows, HIDDEN), generator=generator, device=device).int()
        self.step = torch.zeros((), dtype=torch.int32, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        weight = self.weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's own thread may call CUDA meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.step.add_(1)
            every = ((self.base + self.step * 7) % 251 - 125).to(torch.bfloat16)
            wanted = every.float().sum(0)  # small integers: exact in any order
            self.mine = every[kernels.rank].contiguous()
            self.out = kernels.all_reduce(self.mine, workspace=name)
            two = kernels.all_reduce(self.mine, workspace=name, variant=Variant.TWO_STAGE)
            packets = kernels.all_reduce(self.mine, workspace=name, variant=Variant.PACKETS)
            h = wanted + every[0].float()
            exact = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
            for got in (self.out, two, packets):
                self.wrong.add_((got != wanted.to(torch.bfloat16)).sum())
            for variant in (Variant.PACKETS, Variant.ONE_SHOT):
                normed, kept = kernels.all_reduce_rms_norm(
                    self.mine, every[0].contiguous(), weight, EPS, workspace=name, variant=variant
                )
                self.wrong.add_((kept != h.to(torch.bfloat16)).sum())
                self.wrong.add_(((normed.float() - exact).abs() > exact.abs() * 2**-7 + 1e-5).sum())


def replayed(kernels: Any, nccl: Any, device: torch.device, replays: int) -> int:
    """Wrong elements over all replays; every hundredth is held against NCCL as well."""
    rows = {"eager": 3, "target": 24, "draft": 1}
    graphs = {name: Captured(kernels, name, rows[name], device) for name in rows}
    order = ["target", "eager", "draft", "draft", "target", "draft", "eager"]
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(replays):
        captured = graphs[order[turn % len(order)]]
        captured.graph.replay()
        if turn % 100 == 99:
            sum_ = captured.mine.float()
            dist.all_reduce(sum_, group=nccl)
            differing += (captured.out != sum_.to(torch.bfloat16)).sum()
    torch.cuda.synchronize(device)
    kernels.check()
    return int(differing) + sum(int(captured.wrong) for captured in graphs.values())


def apart(kernels: Any) -> int:
    """Channels whose counters the ranks disagree on; one that exchanges nothing for a while would hide it."""
    mine = {name: kernels.counters(name) for name in ("eager", "target", "draft")}
    everyone: list[Any] = [None] * kernels.world_size
    dist.all_gather_object(everyone, mine)
    found = [
        (name, channel, values)
        for name, counters in mine.items()
        for channel in range(len(counters))
        if len(set(values := [each[name][channel] for each in everyone])) > 1
    ]
    print(f"counters apart: {found[:4] or 'none'}", flush=True)
    return len(found)


def main(rank: int, ranks: int, store: str, replays: int) -> str:
    from sglang.srt.distributed.one_shot.kernels import open_kernels

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    kernels = open_kernels(group, device)
    for name, value in kernels.describe():
        print(f"{name}: {value}", flush=True)
    nccl = dist.new_group(backend="nccl")
    wrong = against_nccl(kernels, nccl, device)
    print(f"against NCCL: {wrong} elements differ", flush=True)
    differing = replayed(kernels, nccl, device, replays)
    print(f"{replays} replays: {differing} elements differ", flush=True)
    differing += apart(kernels)
    dist.barrier()
    kernels.close()
    dist.barrier()
    return "ok" if not wrong + differing else f"{wrong + differing} elements differ"


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])), flush=True)
    os._exit(0)
