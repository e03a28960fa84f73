# mypy: disable-error-code="no-untyped-call"
"""Times of the all-reduce kernels with all ranks on ONE device: what the kernel itself costs, without any link.

    python benchmark/bench_one_shot_same_device.py OUT.json

Every rank is a stream of this process. No byte crosses NVLink or PCIe, the ranks share one L2 and one memory, so the
rows say nothing of either link; they show launch, fence, flag and norm, and what a change of the kernel does to them.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from sglang.bench_verify.environment import capture
from sglang.bench_verify.rows import Metric, Results, Row, Scalar
from sglang.srt.distributed.one_shot.cuda import CudaKernels, open_local_kernels
from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec, admit
from sglang.srt.distributed.one_shot.protocol import Variant

ROWS = (1, 3, 4, 6, 24, 48)
HIDDEN = 7168
CALLS, REPLAYS = 40, 60
NOTE = "all ranks on one device: no link is crossed, says nothing of NVLink or PCIe"


def microseconds(everyone: list[CudaKernels], call: Callable[[CudaKernels], Any]) -> list[float]:
    """us of one call, one figure a replay: graphs of 40 calls, one graph a rank, replayed together."""
    device = torch.device("cuda", 0)
    streams = [torch.cuda.Stream(device) for _ in everyone]
    graphs = []
    for kernels, stream in zip(everyone, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call(kernels)
        graphs.append(graph)
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for rank in reversed(range(len(graphs))):  # rank 0 last: its time has no wait for a launch in it
            with torch.cuda.stream(streams[rank]):
                if rank == 0:
                    begin.record()
                graphs[rank].replay()
                if rank == 0:
                    end.record()
        torch.cuda.synchronize()
        everyone[0].check()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return times


def row(case: dict[str, Scalar], samples: Sequence[float]) -> Row:
    """One case. Where other work shares the machine, the 10th percentile is the figure to look at."""
    ordered = sorted(samples)
    return Row(
        bench="all_reduce_same_device",
        machine="h200",
        variant="fork",
        case=case,
        metrics={
            "us": Metric(round(statistics.median(ordered), 3), "us"),
            "us_p10": Metric(round(ordered[len(ordered) // 10], 3), "us"),
        },
        note=NOTE,
    )


def caller(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, variant: Variant, fused: bool
) -> Callable[[CudaKernels], None]:
    """One call of one rank, out of place so that every replay sees the same inputs."""
    y, h = torch.empty_like(x), torch.empty_like(x)

    def call(k: CudaKernels) -> None:
        if fused:
            k.all_reduce_rms_norm(
                x[k.rank], residual[k.rank], weight, 1e-6, out=y[k.rank], residual_out=h[k.rank],
                workspace="target", variant=variant, limit_s=10.0,
            )  # fmt: skip
        else:
            k.all_reduce(x[k.rank], out=y[k.rank], workspace="target", variant=variant, limit_s=10.0)

    return call


def cases(everyone: list[CudaKernels], max_blocks: int) -> Iterator[tuple[dict[str, Scalar], list[float]]]:
    """Every operation, variant and row count for these ranks; of packets also each shape (0: the default)."""
    device, ranks = torch.device("cuda", 0), len(everyone)
    for count in ROWS:
        x = torch.randn(ranks, count, HIDDEN, device=device).bfloat16()
        residual = torch.randn(count, HIDDEN, device=device).bfloat16().expand_as(x).contiguous()
        weight = torch.randn(HIDDEN, device=device).bfloat16()
        ways = list(product(Variant, (False, True), (False, True), (0,)))
        ways += [(Variant.PACKETS, False, True, shape) for shape in (1, 2, 4, 8)]
        ways += [(Variant.PACKETS, False, False, shape) for shape in (32, 64, 128, 256)]
        for variant, dependent, fused, shape in ways:
            if not admit(count, HIDDEN, torch.bfloat16, ranks, variant=variant):
                continue
            for kernels in everyone:
                kernels.dependent_launch, kernels.packet_shape = dependent, shape
            case: dict[str, Scalar] = {
                "op": "all_reduce_rms_norm" if fused else "all_reduce", "method": variant.value,
                "dependent_launch": dependent, "ranks": ranks, "max_blocks": max_blocks, "rows": count,
                "hidden": HIDDEN, "dtype": "bfloat16", "shape": shape,
            }  # fmt: skip
            yield case, microseconds(everyone, caller(x, residual, weight, variant, fused))


def main(out: Path) -> None:
    """Measure every case and write rows."""
    results = Results(environments=[capture(root=Path(__file__).resolve().parent)])
    for ranks, max_blocks in ((2, 48), (8, 8)):
        spec = WorkspaceSpec(64, 8192, max_blocks)
        everyone = open_local_kernels(ranks, torch.device("cuda", 0), {"target": spec})
        for case, samples in cases(everyone, max_blocks):
            results.add(row(case, samples))
            print(case, results.rows[-1].metrics["us"].value, flush=True)
            results.save(out)
        for kernels in everyone:
            kernels.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
