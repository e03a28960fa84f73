"""What each rank sees of its environment, read back inside it while all ranks start."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.verify_settings.readback import complaints, gather, own_record, text

__all__ = ["at_start", "gather", "own_record", "rank_records", "text"]

logger = logging.getLogger(__name__)
_gathered: list[dict[str, Any]] | None = None


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
        for complaint in complaints(_gathered):
            logger.warning("a setting is not what the launcher passed on: %s", complaint)


def rank_records(scheduler: Any) -> list[dict[str, Any]]:
    """The gathered records, or this rank's own when nothing was gathered."""
    if _gathered is not None:
        return _gathered
    ps = getattr(scheduler, "ps", None)
    return [own_record(int(getattr(ps, "tp_rank", 0)))]
