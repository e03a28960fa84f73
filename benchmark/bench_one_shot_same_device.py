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

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed.one_shot.cuda import CudaKernels, open_local_kernels
from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec
from sglang.srt.distributed.one_shot.protocol import Variant

ROWS = (1, 3, 4, 6, 24, 48)
HIDDEN = 7168
CALLS, REPLAYS = 40, 60
NOTE = "all ranks on one device: no link is crossed, says nothing of NVLink or PCIe"


def microseconds(everyone: list[CudaKernels], call: Callable[[CudaKernels], Any]) -> tuple[float, float]:
    """Median and 10th percentile of one call in us: graphs of 40 calls, one graph a rank, replayed together.

    Where the machine runs other work at the same time, the 10th percentile is the one to look at.
    """
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
    times.sort()
    return statistics.median(times), times[len(times) // 10]


def main(out: Path) -> None:
    """Measure every case and write rows."""
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    for ranks, max_blocks in ((2, 48), (8, 8)):
        spec = WorkspaceSpec(64, 8192, max_blocks)
        everyone = open_local_kernels(ranks, device, {"target": spec})
        for count in ROWS:
            x = torch.randn(ranks, count, HIDDEN, device=device).bfloat16()
            residual = torch.randn(count, HIDDEN, device=device).bfloat16().expand_as(x).contiguous()
            weight = torch.randn(HIDDEN, device=device).bfloat16()
            y, h = torch.empty_like(x), torch.empty_like(x)
            for variant in Variant:
                for dependent in (False, True):
                    for kernels in everyone:
                        kernels.dependent_launch = dependent

                    def plain(k: CudaKernels, variant: Variant = variant, x: Any = x, y: Any = y) -> None:
                        k.all_reduce(
                            x[k.rank], out=y[k.rank], workspace="target", variant=variant, limit_s=10.0
                        )

                    def fused(
                        k: CudaKernels,
                        variant: Variant = variant,
                        x: Any = x,
                        y: Any = y,
                        h: Any = h,
                        r: Any = residual,
                        w: Any = weight,
                    ) -> None:
                        k.all_reduce_rms_norm(
                            x[k.rank], r[k.rank], w, 1e-6, out=y[k.rank], residual_out=h[k.rank],
                            workspace="target", variant=variant, limit_s=10.0,
                        )  # fmt: skip

                    for name, call in (("all_reduce", plain), ("all_reduce_rms_norm", fused)):
                        median, low = microseconds(everyone, call)
                        rows.append(
                            {
                                "op": name, "variant": variant.value, "dependent_launch": dependent,
                                "ranks": ranks, "max_blocks": max_blocks, "rows": count, "hidden": HIDDEN,
                                "dtype": "bfloat16", "us": round(median, 3), "us_p10": round(low, 3),
                            }
                        )  # fmt: skip
                        print(rows[-1], flush=True)
        for kernels in everyone:
            kernels.close()
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "note": NOTE}
    out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
