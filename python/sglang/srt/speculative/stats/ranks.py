"""What each rank sees of its environment, read back inside it.

Variables that were set for the launcher are not proof of anything: the question after a slow week is
whether they reached the workers. Each rank reads its own process and the records are gathered once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from sglang.bench_verify.environment import native_environment

logger = logging.getLogger(__name__)

PREFIXES = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
_gathered: list[dict[str, Any]] | None = None


def own_record(rank: int, device: str = "") -> dict[str, Any]:
    """This process's record: rank, pid, device, NCCL version, and the variables NCCL reads."""
    variables: dict[str, str] = {}
    for prefix in PREFIXES:
        variables.update(native_environment(prefix))
    return {
        "rank": rank,
        "pid": os.getpid(),
        "device": device,
        "nccl_version": nccl_version() if device.startswith("cuda") else "",
        "variables": variables,
    }


def nccl_version() -> str:
    """The NCCL that this process loaded; empty where there is none."""
    with contextlib.suppress(Exception):
        import torch

        read: Any = torch.cuda.nccl.version
        return ".".join(str(part) for part in read())
    return ""


def gather(rank: int, size: int, group: Any, device: str = "") -> list[dict[str, Any]]:
    """The records of every rank of a CPU process group, in rank order. Every rank must call it."""
    record = own_record(rank, device)
    if size <= 1:
        return [record]
    import torch.distributed as dist

    records: list[Any] = [None] * size
    dist.all_gather_object(records, record, group=group)
    return sorted(records, key=lambda item: int(item["rank"]))


def at_start(scheduler: Any) -> None:
    """Gather once, while every rank is starting and none can be busy with something else."""
    global _gathered
    worker = scheduler.tp_worker
    _gathered = gather(
        int(scheduler.ps.tp_rank),
        int(scheduler.ps.tp_size),
        scheduler.tp_cpu_group,
        f"{worker.device}:{getattr(scheduler, 'gpu_id', 0)}",
    )
    if scheduler.ps.tp_rank == 0:
        logger.info("%s", text(_gathered))


def rank_records(scheduler: Any) -> list[dict[str, Any]]:
    """The gathered records, or this rank's own when nothing was gathered."""
    if _gathered is not None:
        return _gathered
    ps = getattr(scheduler, "ps", None)
    return [own_record(int(getattr(ps, "tp_rank", 0)))]


def text(records: list[dict[str, Any]]) -> str:
    """One line: the variables as the ranks see them, and which rank sees something else."""
    first = records[0]["variables"]
    odd = [
        f"rank {item['rank']} differs: {_flat(item['variables'])}"
        for item in records
        if item["variables"] != first
    ]
    same = f"NCCL environment as read back in {len(records)} rank(s): {_flat(first)}"
    return "; ".join([same, *odd])


def _flat(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "nothing set"
