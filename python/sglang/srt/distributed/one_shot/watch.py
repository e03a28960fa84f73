"""Ranks of one machine watch each other, so that a dead or failed one ends the others with its name.

Without this, the ranks that are left wait in a kernel or a collective that nobody will finish: at full power and
with an open port. Liveness is a record lock that each rank holds on a file of a shared folder: the kernel releases
it with the process, however that ends, and a rank that is merely slow is never taken for dead. An error that a
rank wants to be known is a second file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("sglang.fork")

POLL_S = 1.0
#: Between noticing a death and acting on it: in a shutdown everybody goes, and the parent ends us meanwhile.
GRACE_S = 8.0
#: A rank that has told of its own failure is given this long to unwind by itself.
UNWIND_S = 5.0


@dataclass(frozen=True)
class Loss:
    """A rank that will not come back: who, its process, what it was doing, and its own words if it had any."""

    rank: int
    pid: int
    phase: str
    error: str = ""

    def sentence(self, me: int) -> str:
        """One line for the log of rank ``me``."""
        what = "failed" if self.error else "died"
        words = f": {self.error}" if self.error else " without a word"
        return f"rank {self.rank} (process {self.pid}) {what} during {self.phase}{words}; rank {me} ends"


class RankWatch:
    """Watches the other ranks of a group from a thread.

    Args:
        folder: the same on all ranks, empty before the first of them.
        rank: of this process.
        size: of the group.
        on_loss: called once, from the watching thread, with the first loss. It normally does not return.
        poll_s, grace_s: how often to look, and how long to wait before acting on a death without an error.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        on_loss: Callable[[Loss], None],
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._on_loss, self._poll_s, self._grace_s = on_loss, poll_s, grace_s
        self._stop = threading.Event()
        self._phases = ["start"]
        self._lock = self._hold()
        self._tell()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def _hold(self) -> int:
        # Never opened a second time in this process: closing any descriptor of a file drops its record locks.
        lock = os.open(self.folder / f"{self.rank}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock

    def _tell(self) -> None:
        self._write(f"{self.rank}.json", json.dumps({"pid": os.getpid(), "phase": self._phases[-1]}))

    def _write(self, name: str, text: str) -> None:
        scratch = self.folder / f"{name}.part"
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, self.folder / name)

    def start(self) -> None:
        """Begin to watch; every rank must hold its lock by now (a barrier lies between)."""
        self._thread.start()

    def stop(self) -> None:
        """End watching and let go of the lock; the others take that for a death unless they stop too."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5 * self._poll_s)
        os.close(self._lock)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this rank is doing, for the others' sentence; an exception inside is told to them at once.

        Cleaning up may hang in a collective that the others never enter, so the error is out before it begins.
        """
        self._phases.append(name)
        self._tell()
        try:
            yield
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._phases.pop()
            self._tell()

    def fail(self, error: str) -> None:
        """Tell the others that this rank has failed. The first error is the one that is kept."""
        if not (self.folder / f"{self.rank}.error").exists():
            phase = self._phases[-1]
            logger.error("rank %d failed during %s: %s", self.rank, phase, error)
            self._write(f"{self.rank}.error", json.dumps({"phase": phase, "error": error.strip()}))

    def look(self) -> Loss | None:
        """The first rank that is lost now, one with an error before one without; None if all are well."""
        silent = None
        for rank in range(self.size):
            error = self._read(f"{rank}.error")
            if error is not None and rank != self.rank:
                return Loss(rank, int(self._about(rank)["pid"]), str(error["phase"]), str(error["error"]))
            if rank != self.rank and silent is None and self._dead(rank):
                about = self._about(rank)
                silent = Loss(rank, int(about["pid"]), str(about["phase"]))
        return silent

    def _about(self, rank: int) -> dict[str, Any]:
        return self._read(f"{rank}.json") or {"pid": 0, "phase": "start"}

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def _dead(self, rank: int) -> bool:
        try:
            other = os.open(self.folder / f"{rank}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False  # a folder that was cleaned away says nothing about its owner
        try:
            fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(other)
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            loss = self.look()
            if loss is None:
                if (self.folder / f"{self.rank}.error").exists():
                    self._end_self()
                continue
            # An error may follow its rank's death by a moment, and in a shutdown our own end does.
            deadline = time.monotonic() + (0 if loss.error else self._grace_s)
            while time.monotonic() < deadline and not self._stop.wait(self._poll_s):
                loss = self.look() or loss
                if loss.error:
                    break
            if not self._stop.is_set():
                self._on_loss(loss)
            return

    def _end_self(self) -> None:
        if not self._stop.wait(UNWIND_S):
            about = self._read(f"{self.rank}.error") or {}
            self._on_loss(
                Loss(
                    self.rank,
                    os.getpid(),
                    str(about.get("phase")),
                    f"{about.get('error')} (and did not unwind)",
                )
            )
            self._stop.set()
