"""Ranks of one machine watch each other, so that a dead or failed one ends the others with its name.

Without this, the ranks that are left wait in a kernel or a collective that nobody will finish: at full power and
with an open port. Liveness is a record lock that each rank holds on a file of a shared folder: the kernel releases
it with the process, however that ends, and a rank that is merely slow is never taken for dead. The file itself says
what the rank is doing, why it failed, or which other rank's loss it ends for: whoever looks late finds several ranks
dead and must still name the first. Once every rank has opened every file the folder can go: nothing is left behind
by ranks that are killed.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("sglang.fork")

POLL_S = 1.0
#: Between noticing a death and acting on it: in a shutdown everybody goes, and the parent ends us meanwhile.
GRACE_S = 8.0
#: Bytes of a rank's file, and characters of each of the two errors in it (four bytes each at most).
_RECORD, _TEXT = 8192, 600
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
        self._phases, self._error = ["start or serving"], ""
        self._cause: Loss | None = None  # the other rank's loss that this rank ends or failed for
        # Never opened a second time in this process: closing any descriptor of a file drops its record locks.
        self._files = {rank: os.open(folder / str(rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)}
        fcntl.lockf(self._files[rank], fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._tell()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def _tell(self) -> None:
        cause = asdict(self._cause) if self._cause else None
        about = {"pid": os.getpid(), "phase": self._phases[-1], "error": self._error[:_TEXT], "cause": cause}
        os.pwrite(self._files[self.rank], json.dumps(about, ensure_ascii=False).encode().ljust(_RECORD), 0)

    def start(self) -> None:
        """Open the others' files and begin to watch; every rank must have made its own by now (a barrier lies between).

        When all ranks have come this far (another barrier), the folder may be removed.
        """
        for rank in range(self.size):
            if rank != self.rank:
                self._files[rank] = os.open(self.folder / str(rank), os.O_RDWR | os.O_CLOEXEC)
        atexit.register(self._last_look)
        self._thread.start()

    def stop(self) -> None:
        """End watching and let go of the lock; the others take that for a death unless they stop too."""
        self._stop.set()
        atexit.unregister(self._last_look)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5 * self._poll_s)
        for file in self._files.values():
            os.close(file)

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
            if not self._error:  # what a rank failed in outlasts the blocks around it
                self._phases.pop()
                self._tell()

    def fail(self, error: str) -> None:
        """Tell the others that this rank has failed, or that it did because another was lost before.

        The first error is the one that is kept.
        """
        if not self._error:
            self._error = error.strip() or "no text"
            self._cause = self.look()  # a broken connection, say, is no news beside the death that broke it
            logger.error("rank %d failed during %s: %s", self.rank, self._phases[-1], self._error)
            self._tell()

    def look(self) -> Loss | None:
        """The rank that is lost now: one that others end for, else one with an error, else a dead one.

        None if all are well.
        """
        failed = silent = None
        for rank in self._files:
            if rank == self.rank:
                continue
            about = self._read(rank)
            cause = about["cause"]
            if cause and cause["rank"] != self.rank:
                return Loss(**cause)
            if cause and self._error:  # it ends for this rank's own failure
                continue
            loss = Loss(rank, int(about["pid"]), str(about["phase"]), str(about["error"]))
            if loss.error:
                failed = failed or loss
            elif silent is None and self._dead(rank):
                silent = loss
        return failed or silent

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(os.pread(self._files[rank], _RECORD, 0))
        except ValueError:  # read while it was written: the next look will do
            found = {"pid": 0, "phase": "start or serving", "error": "", "cause": None}
        return found

    def _dead(self, rank: int) -> bool:
        # A shared lock, which only the rank's own excludes: an exclusive one would make two that look at the same
        # moment take each other for the rank, alive.
        try:
            fcntl.lockf(self._files[rank], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._files[rank], fcntl.LOCK_UN)
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            loss = self.look()
            if loss is None:
                if self._error:
                    self._end_self()
                continue
            logger.error("%s", loss.sentence(self.rank))
            # An error may follow its rank's death by a moment, and in a shutdown our own end does.
            deadline = time.monotonic() + (0 if loss.error else self._grace_s)
            while time.monotonic() < deadline and not self._stop.wait(self._poll_s):
                later = self.look()
                if later is not None and later.error:
                    loss = later
                    break
            if not self._stop.is_set():
                self._cause = loss
                self._tell()
                self._on_loss(loss)
            return

    def _end_self(self) -> None:
        if not self._stop.wait(UNWIND_S):
            error = f"{self._error} (and did not unwind)"
            self._on_loss(Loss(self.rank, os.getpid(), self._phases[-1], error))
            self._stop.set()

    def _last_look(self) -> None:
        # A rank that ends by an error of its own (a broken connection) often does so because of another's death,
        # and before the watch has said whose.
        loss = None if self._stop.is_set() else self.look()
        if loss is not None:
            logger.error("%s", loss.sentence(self.rank))
