"""Each rank's record of its own settings, gathered once at start.

Variables that were set for the launcher are not proof of anything: the question after a slow week is whether they
reached the workers. So each rank reads its own process, and compares that with what the launcher passed on.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from sglang.srt.verify_settings import nccl_log, reach
from sglang.srt.verify_settings.native import PREFIXES, native_environment, shown


def nccl_version() -> str:
    """The NCCL that this process loaded; empty where there is none."""
    with contextlib.suppress(Exception):
        import torch

        read: Any = torch.cuda.nccl.version
        return ".".join(str(part) for part in read())
    return ""


def own_record(rank: int, device: str = "") -> dict[str, Any]:
    """This process's record, JSON-ready.

    ``variables`` as the C library holds them (paths hidden), ``differs`` from what the launcher passed on (None
    where no launcher's record arrived), ``nccl_log`` what NCCL's own log says (None where there is none).
    """
    seen = native_environment(PREFIXES)
    launch = reach.load(seen.get(reach.CARRIER, ""))
    log = nccl_log.read_own(seen)
    differs = None if launch is None else reach.differences(launch.expected(), seen)
    if log is not None:
        differs = (differs or []) + nccl_log.contradictions(seen, log)
    return {
        "rank": rank,
        "pid": os.getpid(),
        "device": device,
        "nccl_version": nccl_version() if device.startswith("cuda") else "",
        "variables": shown(reach.carried(seen)),
        "differs": differs,
        "nccl_log": None if log is None else log.as_dict(),
    }


def gather(rank: int, size: int, group: Any, device: str = "") -> list[dict[str, Any]]:
    """The records of every rank of a CPU process group, in rank order. Every rank must call it."""
    record = own_record(rank, device)
    if size <= 1:
        return [record]
    import torch.distributed as dist

    records: list[Any] = [None] * size
    dist.all_gather_object(records, record, group=group)
    return sorted(records, key=lambda item: int(item["rank"]))


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


def complaints(records: list[dict[str, Any]]) -> list[str]:
    """What did not arrive, a sentence a rank."""
    return [f"rank {item['rank']}: {'; '.join(item['differs'])}" for item in records if item.get("differs")]


def _flat(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "nothing set"
