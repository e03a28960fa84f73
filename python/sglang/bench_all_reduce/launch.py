"""Ranks as processes, with a deadline for all of them; the first error is the one that is reported."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from sglang.bench_all_reduce.worker import Job, Result, work
from sglang.verify_demo.process import free_port

_SPAWN = multiprocessing.get_context("spawn")
#: In the place of an error: not the end, but what there is so far.
PARTIAL = "partial"


#: What upstream's launcher sets for a server's ranks where the user did not (entrypoints/engine.py,
#: _set_envs_and_config). NCCL is measured as a server would have it, and makes no NVLink multicast.
SERVER = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
#: Where a machine must not make NVLink multicast objects: neither NCCL nor torch's symmetric memory does then.
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish; the text names it. ``partial`` is what rank 0 had measured, or None."""

    def __init__(self, words: str, partial: Result | None = None) -> None:
        super().__init__(words)
        self.partial = partial


def free_address() -> str:
    """A meeting point on this machine."""
    return f"tcp://127.0.0.1:{free_port()}"


def run(
    job: Job, limit_s: float, verbose: bool, keep: Callable[[Result], None] = lambda result: None
) -> Result:
    """Run every rank and return rank 0's result.

    Args:
        job: what to measure.
        limit_s: longest run.
        verbose: rank 0 says what comes.
        keep: called with what there is before each message, so that the end of this process loses nothing.

    Raises:
        RankFailed: a rank failed, all of them were not done in ``limit_s`` seconds, or an interrupt came.
    """
    queue: Any = _SPAWN.Queue()
    processes = [
        _SPAWN.Process(target=_rank, args=(rank, job, queue, verbose and rank == 0), daemon=True)
        for rank in range(len(job.devices))
    ]
    for process in processes:
        process.start()
    try:
        return _await(processes, queue, limit_s, keep)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(5)


def _await(processes: list[Any], queue: Any, limit_s: float, keep: Callable[[Result], None]) -> Result:
    deadline = time.monotonic() + limit_s
    done: dict[int, Result] = {}
    partial: Result | None = None
    while len(done) < len(processes):
        try:
            rank, result, error = queue.get(timeout=0.5)
        except KeyboardInterrupt:
            raise RankFailed("interrupted", partial) from None
        except Exception:
            dead = [n for n, p in enumerate(processes) if n not in done and p.exitcode not in (None, 0)]
            if dead:
                status = processes[dead[0]].exitcode
                raise RankFailed(f"rank {dead[0]} died with status {status}", partial) from None
            if time.monotonic() > deadline:
                left = [str(n) for n in range(len(processes)) if n not in done]
                words = f"rank {', '.join(left)} not done after {limit_s:.0f} s"
                raise RankFailed(words, partial) from None
            continue
        if error == PARTIAL:
            partial = result
            keep(result)
        elif error:
            raise RankFailed(f"rank {rank}: {error}", partial)
        else:
            done[rank] = result
    return done[0]


def _rank(rank: int, job: Job, queue: Any, verbose: bool) -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # it comes to the whole group; the parent keeps what there is
    started = time.monotonic()

    def tell(text: str, result: Result) -> None:
        if rank == 0:
            queue.put((rank, result, PARTIAL))
        if verbose:
            print(f"  {time.monotonic() - started:5.0f} s  {text}", flush=True)

    try:
        result = work(rank, job, tell)
        queue.put((rank, result, ""))
    except BaseException as error:
        traceback.print_exc()
        queue.put((rank, None, f"{type(error).__name__}: {error}"))
    # Rank 0 holds the store of all: nobody leaves before the parent ends everybody.
    time.sleep(3600)
