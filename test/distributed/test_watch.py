"""Dead and failed ranks end the others with their name, in real processes and bounded in time (sglang#11275)."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from leaf import run_python
from sglang.srt.distributed.one_shot import ending, watch
from sglang.srt.distributed.one_shot.errors import PeerTimeout
from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec
from sglang.srt.distributed.one_shot.simulated import Fabric, SimulatedKernels
from sglang.srt.distributed.one_shot.watch import Loss, RankWatch

LIMIT_S = 30.0


def begin(rank: int, size: int, folder: Path, abort: Any = None, poll_s: float = 0.1) -> RankWatch:
    guard = RankWatch(
        folder, rank, size, lambda loss: ending.end(loss, rank, abort), poll_s=poll_s, grace_s=0.5
    )
    torch.distributed.barrier()
    guard.start()
    # Not a barrier: a rank that dies right behind one takes the connections of those that are still in it along.
    wait_for(folder, *(f"watching-{other}" for other in range(size)), mine=f"watching-{rank}")
    return guard


def wait_for(folder: Path, *names: str, mine: str = "", limit_s: float = 30.0) -> None:
    """Make one file and wait until all the others are there too."""
    if mine:
        (folder / mine).touch()
    deadline = time.monotonic() + limit_s
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def killed(rank: int, size: int, folder: Path) -> None:
    guard = begin(rank, size, folder)
    with guard.phase("graph capture of the target"):
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)


def test_a_killed_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    outcomes, seconds = ranks.run(killed, 3, tmp_path)
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].status == ending.STATUS, outcomes[rank].output
        assert "rank 1 (process " in outcomes[rank].output
        assert "died during graph capture of the target without a word" in outcomes[rank].output
        assert "Thread" in outcomes[rank].output  # the stacks of the rank that was kept waiting
    assert seconds < LIMIT_S


def killed_before_a_late_look(rank: int, size: int, folder: Path) -> None:
    guard = begin(rank, size, folder, poll_s=4.0 if rank == 2 else 0.1)
    with guard.phase("serving"):
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)


def test_who_looks_late_still_names_the_first_that_died(tmp_path: Path) -> None:
    """On a busy machine a rank may look only when another has ended for the death already: both are dead then."""
    outcomes, _ = ranks.run(killed_before_a_late_look, 3, tmp_path)
    assert outcomes[2].status == ending.STATUS, outcomes[2].output
    assert "rank 1 (process " in outcomes[2].output and "rank 0 (process " not in outcomes[2].output


def looking_together(rank: int, size: int, folder: Path) -> Loss | None:
    guard = begin(rank, size, folder, poll_s=1000.0)
    if rank == 1:
        os._exit(9)
    real, deadline = fcntl.lockf, time.monotonic() + LIMIT_S
    while guard.look() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    wait_for(folder, "knows-0", "knows-2", mine=f"knows-{rank}")

    def held_back(file: int, what: int) -> None:
        if what == fcntl.LOCK_UN:
            wait_for(folder, "looked", mine="looking")
        real(file, what)

    if rank == 0:  # stands still in the middle of its look
        fcntl.lockf = held_back
        return guard.look()
    wait_for(folder, "looking")
    try:
        return guard.look()
    finally:
        (folder / "looked").touch()


def test_two_that_look_at_the_same_moment_both_see_the_death(tmp_path: Path) -> None:
    """Else the one that looks only once, as it fails, would miss whose death it fails for."""
    outcomes, _ = ranks.run(looking_together, 3, tmp_path)
    for rank in (0, 2):
        assert outcomes[rank].value is not None and outcomes[rank].value.rank == 1, outcomes[rank].output


def failed_for_a_death(rank: int, size: int, folder: Path) -> None:
    guard = begin(rank, size, folder, poll_s=4.0)
    with guard.phase("serving"):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            time.sleep(1.0)
            raise ConnectionError("closed by peer")
        time.sleep(LIMIT_S)


def test_an_error_that_follows_a_death_does_not_hide_it(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(failed_for_a_death, 3, tmp_path)
    assert outcomes[2].status == ending.STATUS, outcomes[2].output
    assert "rank 1 (process " in outcomes[2].output and "rank 0 (process " not in outcomes[2].output


def spinning(rank: int, size: int, folder: Path) -> None:
    room = {"eager": WorkspaceSpec(max_rows=2, max_hidden=64)}
    kernels = SimulatedKernels(Fabric(size, room, folder / "fabric"), rank)
    guard = begin(rank, size, folder, kernels.abort)
    with guard.phase("serving"):
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        kernels.all_reduce(x, limit_s=0)
        if rank == 0:
            os._exit(9)
        try:
            kernels.all_reduce(x, limit_s=0)  # waits for rank 0 without a limit, as a replay would
        except PeerTimeout as error:
            assert error.aborted
            time.sleep(LIMIT_S)  # the watch ends the rank; a test that is told of the error first would


def test_ranks_that_wait_in_a_kernel_without_a_limit_are_freed(tmp_path: Path) -> None:
    outcomes, seconds = ranks.run(spinning, 2, tmp_path)
    assert outcomes[0].status == 9
    assert outcomes[1].status == ending.STATUS, outcomes[1].output
    assert "rank 0 (process" in outcomes[1].output
    assert seconds < LIMIT_S


def failing(rank: int, size: int, folder: Path) -> None:
    guard = begin(rank, size, folder)
    with guard.phase("start"):
        pass
    try:
        with guard.phase("graph capture of the draft"):
            if rank == 1:
                raise RuntimeError("no room for 8 requests")
            time.sleep(LIMIT_S)
    finally:
        if rank == 1:
            time.sleep(LIMIT_S)  # clean-up that waits for a collective of the others


def test_the_first_ranks_error_is_printed_and_all_ranks_end(tmp_path: Path, monkeypatch: Any) -> None:
    """sglang#11275: an error during capture shows up as a hang, because unwinding waits for the others."""
    monkeypatch.setattr(watch, "UNWIND_S", 1.0)
    outcomes, seconds = ranks.run(failing, 2, tmp_path)
    words = "failed during graph capture of the draft: RuntimeError: no room for 8 requests"
    assert words in outcomes[0].output
    assert words in outcomes[1].output and "did not unwind" in outcomes[1].output
    assert [outcome.status for outcome in outcomes] == [ending.STATUS, ending.STATUS]
    assert seconds < LIMIT_S


def slow(rank: int, size: int, folder: Path) -> str:
    guard = begin(rank, size, folder)
    if rank == 1:
        # A rank inside one long call that keeps the interpreter lock: it beats no heart, and is not dead.
        torch.distributed.barrier()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            sum(range(100_000))
    else:
        torch.distributed.barrier()
        time.sleep(2.0)
    torch.distributed.barrier()
    guard._stop.set()  # nobody lets go of its lock while another still watches it
    torch.distributed.barrier()
    guard.stop()
    return "alive"


def test_a_slow_rank_is_not_taken_for_dead(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(slow, 2, tmp_path)
    assert [outcome.value for outcome in outcomes] == ["alive", "alive"], outcomes[0].output


def forked(rank: int, size: int, folder: Path) -> None:
    guard = begin(rank, size, folder)
    if rank == 1:
        # A forked helper inherits descriptors; a lock that it kept alive would hide its parent's death.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"], close_fds=False)
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os._exit(7)
    with guard.phase("serving"):
        time.sleep(LIMIT_S)


def test_children_of_a_dead_rank_do_not_hide_its_death(tmp_path: Path) -> None:
    outcomes, seconds = ranks.run(forked, 2, tmp_path)
    assert outcomes[0].status == ending.STATUS, outcomes[0].output
    assert seconds < LIMIT_S


def gone(rank: int, size: int, folder: Path) -> None:
    place = folder / "ranks"
    if rank == 0:
        place.mkdir()
    torch.distributed.barrier()
    guard = begin(rank, size, place)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(place)
    torch.distributed.barrier()
    with guard.phase("serving"):
        if rank == 1:
            time.sleep(1.0)  # is not taken for dead meanwhile
            raise ValueError("no more")
        time.sleep(LIMIT_S)


def test_the_folder_is_not_needed_once_all_are_there(tmp_path: Path) -> None:
    """Ranks that are killed leave nothing behind."""
    outcomes, seconds = ranks.run(gone, 2, tmp_path)
    assert "failed during serving: ValueError: no more" in outcomes[0].output
    assert outcomes[0].status == ending.STATUS
    assert 1.0 < seconds < LIMIT_S


def ended_with_a_closed_log(rank: int, size: int, folder: Path) -> None:
    gone = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(gone))
    gone.close()
    ending.end(Loss(1, 7, "serving"), rank)


def test_a_log_that_is_closed_does_not_keep_the_rank(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(ended_with_a_closed_log, 1, tmp_path, group=False)
    assert outcomes[0].status == ending.STATUS, outcomes[0].output
    assert "rank 1 (process 7) died during serving" in outcomes[0].output


@pytest.mark.parametrize(
    ("error", "words"),
    [("", "died during x without a word"), ("OSError: full", "failed during x: OSError: full")],
)
def test_the_sentence(error: str, words: str) -> None:
    assert words in Loss(3, 77, "x", error).sentence(0)
    assert Loss(3, 77, "x", error).sentence(0).startswith("rank 3 (process 77)")


SERVER = """
import multiprocessing, os, signal, time
from sglang.srt.distributed.one_shot import ending
from sglang.srt.distributed.one_shot.watch import Loss

def worker():
    ending.end(Loss(1, 7, "serving"), 0)

def told(*_):
    print("told", flush=True)
    os._exit(0)  # an exception would be lost where the signal comes inside the fork

if __name__ == "__main__":
    signal.signal(signal.SIGQUIT, told)
    multiprocessing.get_context("fork").Process(target=worker).start()
    time.sleep(20)
"""


def test_the_server_is_told(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    done = run_python(str(tmp_path / "server.py"))
    assert "told" in done.stdout, done.stderr
    assert "rank 1 (process 7) died during serving" in done.stderr


BY_HAND = """
import os, signal
from sglang.srt.distributed.one_shot import ending
from sglang.srt.distributed.one_shot.watch import Loss
os.kill = lambda *_: print("a shell was signalled", flush=True)
ending.end(Loss(1, 7, "serving"), 0)
"""


def test_a_rank_started_by_hand_signals_nobody() -> None:
    done = run_python("-c", BY_HAND)
    assert done.returncode == ending.STATUS
    assert "signalled" not in done.stdout
