"""Ranks as processes, with a deadline for all of them; the first error is the one that is reported."""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from typing import Any

from sglang.bench_all_reduce.worker import Job, Result, work

_SPAWN = multiprocessing.get_context("spawn")


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish; the text names it."""


def free_address() -> str:
    """A meeting point on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run(job: Job, limit_s: float, verbose: bool) -> Result:
    """Run every rank and return rank 0's result.

    Raises:
        RankFailed: a rank failed, or all of them were not done in ``limit_s`` seconds.
    """
    queue: Any = _SPAWN.Queue()
    processes = [
        _SPAWN.Process(target=_rank, args=(rank, job, queue, verbose and rank == 0), daemon=True)
        for rank in range(len(job.devices))
    ]
    for process in processes:
        process.start()
    try:
        return _await(processes, queue, limit_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(5)


def _await(processes: list[Any], queue: Any, limit_s: float) -> Result:
    deadline = time.monotonic() + limit_s
    done: dict[int, Result] = {}
    while len(done) < len(processes):
        try:
            rank, result, error = queue.get(timeout=0.5)
        except Exception:
            dead = [n for n, p in enumerate(processes) if n not in done and p.exitcode not in (None, 0)]
            if dead:
                raise RankFailed(f"rank {dead[0]} died with status {processes[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                left = [str(n) for n in range(len(processes)) if n not in done]
                raise RankFailed(f"rank {', '.join(left)} not done after {limit_s:.0f} s") from None
            continue
        if error:
            raise RankFailed(f"rank {rank}: {error}")
        done[rank] = result
    return done[0]


def _rank(rank: int, job: Job, queue: Any, verbose: bool) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        result = work(rank, job, lambda text: print(f"  {text}", flush=True) if verbose else None)
        queue.put((rank, result, ""))
    except BaseException as error:
        traceback.print_exc()
        queue.put((rank, None, f"{type(error).__name__}: {error}"))
    # Rank 0 holds the store of all: nobody leaves before the parent ends everybody.
    time.sleep(3600)
