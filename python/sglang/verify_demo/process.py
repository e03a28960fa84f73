"""A server as a child that cannot outlive its starter: own session, bounded stop, memory seen from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

#: Seconds that a server gets between SIGTERM and SIGKILL. It drains for up to 5 s of its own.
STOP_GRACE = 10.0
#: Seconds for the processes to be gone after SIGKILL: on a busy machine also a killed one has to run once more.
KILL_GRACE = 60.0
#: Where the kernel's range for ports of its own choice is told, its usual begin, and the least port taken here.
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FROM, _LEAST_PORT = 32768, 10000
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ServerError(RuntimeError):
    """The server did not come up, or went away; the text holds the end of its log."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now, and that the kernel gives nobody meanwhile.

    A server binds it only after a minute of imports. A port of the kernel's own range may by then be the source of
    somebody's connection or belong to another socket that was bound to "any"; one below that range stays free.
    """
    first = _EPHEMERAL_FROM
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = int(_PORT_RANGE.read_text().split()[0])
    below = range(_LEAST_PORT, first)
    tried = random.SystemRandom().sample(below, min(len(below), 64))
    for port in (*tried, 0):  # 0: any, where the range leaves none, or all that were tried are taken
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no TCP port of the loopback interface is free")


def session_members(session: int) -> list[int]:
    """Process ids whose session is `session` and that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold spaces; what follows the last one does not.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def proportional_bytes(pids: Sequence[int]) -> int:
    """Memory of processes in bytes, each shared page split among its users (so that a sum counts it once)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _die_with_parent() -> None:
    """Runs in the child before exec: if the starter is killed outright, the server is told to stop."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for the end of the block: an exception inside ``Popen`` would lose its child."""
    if threading.current_thread() is not threading.main_thread():  # no exception of a signal comes here
        yield
        return
    came: list[int] = []
    before = {}
    for sign in (signal.SIGINT, signal.SIGTERM):
        # What is ignored stays so, also in the child; what is not Python's own could not be put back.
        if callable(signal.getsignal(sign)):
            before[sign] = signal.signal(sign, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
        for number in came:
            signal.raise_signal(number)


class Server:
    """A server process for the length of a ``with`` block.

    The child leads its own session: a Ctrl-C in the terminal reaches the starter alone, which then stops every
    process of that session, also those that the server started. The log begins with the command.

    ``watch_memory`` samples ``peak_bytes`` every second. A bench leaves it off: reading a large process's page
    statistics holds its memory map's lock.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        watch_memory: bool = True,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.peak_bytes = 0
        self._watch = watch_memory
        self._environment = dict(os.environ if environment is None else environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_watching = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as output, _interrupts_held():
                output.write(f"# {shlex.join(self.command)}\n".encode())
                output.flush()
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            if self._watch:
                self._watcher = threading.Thread(target=self._watch_memory, daemon=True)
                self._watcher.start()
        except (
            BaseException
        ):  # an interrupt: nobody's block has begun yet that would stop the server at its end
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id, also the session's. Raises RuntimeError outside the ``with`` block."""
        if self._process is None:
            raise RuntimeError("the server was not started: use it in a with block")
        return self._process.pid

    def check(self) -> None:
        """Raises ServerError with the end of the log if the server has exited."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise ServerError(
                f"the server exited with status {code}; the end of {self.log}:\n{self.tail(20)}"
            )

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 16384))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End every process of the server's session; returns when none is left. Safe to call twice."""
        self._stop_watching.set()
        process = self._process
        if process is None:
            return
        for sign, grace in ((signal.SIGTERM, STOP_GRACE), (signal.SIGKILL, KILL_GRACE)):
            asked: set[int] = set()
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                process.poll()  # reaps the leader
                members = set(session_members(process.pid))
                if not members:
                    break
                # Also those that were forked while the others were being told: a server that starts makes many.
                for pid in members - asked:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sign)
                asked |= members
                time.sleep(0.05)
        process.wait(timeout=KILL_GRACE)
        if self._watcher is not None:
            self._watcher.join(timeout=KILL_GRACE)

    def _watch_memory(self) -> None:
        while not self._stop_watching.wait(1.0):
            self.peak_bytes = max(self.peak_bytes, proportional_bytes(session_members(self.pid)))
