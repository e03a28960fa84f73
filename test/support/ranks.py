"""Ranks as real processes with a deadline: each runs one function, and none outlives its test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# Forked, so that a rank starts in milliseconds: the test's own process has neither threads of torch nor a group.
_FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """How a rank ended: exit status (None: killed at the deadline), what it returned or raised, what it printed."""

    status: int | None
    value: Any = None
    error: str = ""
    output: str = ""


def run(
    work: Callable[..., Any],
    size: int,
    folder: Path,
    *args: Any,
    deadline_s: float = 120.0,
    group: bool = True,
) -> tuple[list[Outcome], float]:
    """Run ``work(rank, size, folder, *args)`` in ``size`` processes; outcomes by rank, and seconds until the last ended.

    With ``group`` every rank is in a gloo process group first.
    """
    (folder / "port").unlink(missing_ok=True)
    started = time.monotonic()
    results, leaves, processes = [], [], []
    for rank in range(size):
        result, sender = _FORK.Pipe(duplex=False)
        held, leave = _FORK.Pipe(duplex=False)
        process = _FORK.Process(
            target=_child, args=(work, rank, size, folder, sender, held, deadline_s, group, args)
        )
        process.start()
        sender.close()
        held.close()
        results.append(result)
        leaves.append(leave)
        processes.append(process)
    outcomes = [Outcome(None) for _ in range(size)]
    # Rank 0 holds the store of all: nobody leaves before everybody has an outcome.
    for rank, result in enumerate(results):
        with contextlib.suppress(EOFError):
            while processes[rank].is_alive() or result.poll(0):
                if result.poll(0.05):
                    outcomes[rank].value, outcomes[rank].error = result.recv()
                    break
                if time.monotonic() > started + deadline_s:
                    break
    seconds = time.monotonic() - started
    for leave in leaves:
        with contextlib.suppress(OSError):
            leave.send(None)  # closing would not do: ranks forked later hold this end too
    for rank, process in enumerate(processes):
        process.join(max(1.0, started + deadline_s - time.monotonic()))
        outcomes[rank].status = process.exitcode
        if process.is_alive():
            process.kill()
            process.join(5)
        outcomes[rank].output = (folder / f"output-{rank}").read_text(encoding="utf-8")
    return outcomes, seconds


def _store(rank: int, size: int, file: Path, limit_s: float) -> Any:
    """Rank 0's store. It takes a port that is free and says which: one that was free before may not be any more."""
    from torch.distributed import TCPStore

    limit = timedelta(seconds=limit_s)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port), encoding="utf-8")
        file.with_suffix(".new").replace(file)
        return store
    deadline = time.monotonic() + limit_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 opened no store within {limit_s:.0f} s")
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(file.read_text(encoding="utf-8")), size, False, limit)


def _child(
    work: Callable[..., Any],
    rank: int,
    size: int,
    folder: Path,
    sender: Any,
    held: Any,
    deadline_s: float,
    group: bool,
    args: Any,
) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    try:
        import torch
        from sglang.srt.distributed.one_shot import ending

        torch.set_num_threads(1)
        # The parent of these ranks is pytest: what a rank tells its server must not end the test run.
        ending._tell_parent = lambda: None
        if group:
            store = _store(rank, size, folder / "port", deadline_s)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        sender.send((work(rank, size, folder, *args), ""))
    except BaseException as error:
        traceback.print_exc()
        sender.send((None, f"{type(error).__name__}: {error}"))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    held.poll(deadline_s)
    # No clean-up: a group that lost a rank may wait for it here.
    os._exit(0)
