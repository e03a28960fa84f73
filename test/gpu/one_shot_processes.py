"""Ranks as processes on one device. Without MPS their kernels take turns in time slices: slow, and still right."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 120.0


def run_processes(ranks: int, method: str, expandable: bool) -> list[str]:
    """One line of each rank: ``ok``, or what went wrong."""
    environment = dict(os.environ)
    if expandable:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(ranks), f"{folder}/store", method],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        lines = []
        try:
            for process in running:
                text, _ = process.communicate(timeout=LIMIT_S)
                lines.append(
                    text.strip().splitlines()[-1] if text.strip() else f"status {process.returncode}"
                )
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
        return lines


def main(rank: int, ranks: int, store: Path, method: str) -> None:
    import torch
    import torch.distributed as dist
    from sglang.srt.distributed.one_shot import buffers, cuda
    from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec
    from sglang.srt.distributed.one_shot.protocol import Variant

    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", 0)
    if method != "IPC":  # as if legacy handles were refused
        share = buffers.share
        buffers.share = lambda *arguments: share(*arguments, method=buffers.Method[method])  # type: ignore[assignment]
    names = ("eager", "target", "draft", "preflight")
    kernels = cuda.open_cuda_kernels(group, device, dict.fromkeys(names, WorkspaceSpec(8, 1024, 4)))
    assert ("sharing", buffers.Method[method].value) in kernels.describe(), kernels.describe()
    wrong = 0
    for turn in range(100):
        every = [((torch.arange(3 * 1024) * (r + 3) + turn) % 251 - 125).view(3, 1024) for r in range(ranks)]
        wanted = sum(part.float() for part in every)
        x = every[rank].to(device, torch.bfloat16)
        variant = list(Variant)[turn % 3]
        out = kernels.all_reduce(x, workspace=names[turn // 3 % 3], variant=variant, limit_s=20.0)
        torch.cuda.synchronize()
        kernels.check()
        wrong += int((out.cpu().float() != wanted.to(torch.bfloat16).float()).sum())  # type: ignore[union-attr]
    dist.barrier()
    kernels.close()
    dist.barrier()
    print("ok" if not wrong else f"{wrong} elements differ", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
