"""A rank over upstream's own coordinator on a GPU that ranks share: eager, captured, fused, and one that dies.

``python one_shot_group.py RANK RANKS STORE [die]``; the last line is ``ok`` or what is wrong.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

HIDDEN = 7168
DEVICE = torch.device("cuda", 0)


def values(rank: int, turn: int, rows: int) -> torch.Tensor:
    """Small integers: any order of summation gives the same bits."""
    index = torch.arange(rows * HIDDEN, device=DEVICE)
    return ((index * 7 + rank * 11 + turn * 5) % 31 - 15).view(rows, HIDDEN).to(torch.bfloat16)


def total(ranks: int, turn: int, rows: int) -> torch.Tensor:
    """What a reduction of ``values`` must give."""
    return sum(values(rank, turn, rows).float() for rank in range(ranks)).to(torch.bfloat16)  # type: ignore[union-attr]


def coordinator(rank: int, ranks: int, store: str) -> Any:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    return GroupCoordinator([list(range(ranks))], 0, "gloo", *[False] * 7, group_name="tp")


class Captured:
    """One graph: a plain reduction, then a fused one of its result, over static inputs."""

    def __init__(self, group: Any, draft: bool, rows: int) -> None:
        from sglang.srt.distributed.one_shot import capture, hooks

        self.x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.residual, self.weight = torch.zeros_like(self.x), torch.ones_like(self.x[0])
        runner = type("R", (), {"model_runner": type("M", (), {"is_draft_worker": draft})()})()
        self.graph = torch.cuda.CUDAGraph()

        def record(_: Any) -> None:
            self.workspace = capture._graph.get()
            with group.graph_capture() as context, torch.cuda.graph(self.graph, stream=context.stream):
                self.sum = group.all_reduce(self.x)
                communicator = hooks.communicator_of(group)
                assert communicator is not None
                self.normed, self.kept = communicator.all_reduce_rms_norm(
                    self.x, self.residual, self.weight, 1e-6
                )

        hooks.capture_graphs(record, runner)

    def wrong(self, rank: int, ranks: int, turn: int) -> int:
        rows = self.x.shape[0]
        self.x.copy_(values(rank, turn, rows))
        self.residual.copy_(values(9, turn, rows))
        self.graph.replay()
        wanted = total(ranks, turn, rows)
        kept = (wanted.float() + values(9, turn, rows).float()).to(torch.bfloat16)
        norm = kept.float() * torch.rsqrt(kept.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        far = (self.normed.float() - norm).abs() > 2**-6 * norm.abs() + 2**-6
        return int((self.sum != wanted).sum() + (self.kept != kept).sum() + far.sum())


def main(rank: int, ranks: int, store: str, die: bool) -> str:
    from sglang.srt.distributed.one_shot import hooks

    group = coordinator(rank, ranks, store)
    for name, value in hooks.describe():
        print(f"{name}: {value}", flush=True)
    communicator = hooks.communicator_of(group)
    if communicator is None:
        return "no communicator"
    graphs = [Captured(group, draft, rows) for draft, rows in ((False, 3), (True, 1), (False, 1), (True, 3))]
    if [graph.workspace for graph in graphs] != ["target", "draft", "target", "draft"]:
        return f"workspaces {[graph.workspace for graph in graphs]}"
    print("captured", dict(communicator.calls), flush=True)
    wrong = 0
    for turn in range(40):
        rows = (1, 3, 4, 7)[turn % 4]
        wrong += int((group.all_reduce(values(rank, turn, rows)) != total(ranks, turn, rows)).sum())
        wrong += sum(graph.wrong(rank, ranks, turn) for graph in graphs)
    torch.cuda.synchronize()
    dist.barrier()
    if wrong:
        return f"{wrong} elements differ"
    print("replayed", flush=True)
    if die:
        if rank == 1:
            os._exit(9)
        graphs[0].graph.replay()  # waits for rank 1 without a limit
        torch.cuda.synchronize()
        return "the replay ended without rank 1"
    return "ok"


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "die" in sys.argv), flush=True)
    os._exit(0)
