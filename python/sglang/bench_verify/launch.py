"""Starts servers one after the other on the same machine, forth and back.

The order A B C C B A gives each server two starts, an early and a late one: a machine that warms up or
throttles then shows as a difference between two runs of the same server, and not as a difference between
servers.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from sglang.bench_verify.client import Client
from sglang.srt.speculative.stats.baseline import VARIABLE as BASELINE_VARIABLE


class LaunchError(RuntimeError):
    """A server that did not come up; the message ends with its last lines."""


@dataclass(frozen=True)
class ServerPlan:
    """How to start one server.

    ``variant`` and ``topics_off`` go into the rows. ``steps`` is 0 for the baseline.
    """

    name: str
    variant: str
    steps: int = 0
    topics_off: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def plans(
    model: str,
    draft: str,
    steps: int,
    names: Sequence[str],
    stock: Sequence[str],
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[ServerPlan]:
    """Server plans by name: ``baseline`` (no speculation), ``upstream`` (topics off), ``fork``.

    Args:
        stock: topics to switch off for stock behaviour.
        extra: further server arguments, for every server.
    """
    common = ("--model-path", model, *extra)
    speculative = (
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        draft,
        "--speculative-num-steps",
        str(steps),
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        str(steps + 1),
    )
    shared = dict(environment or {})
    known = {
        "baseline": ServerPlan("baseline", "fork", 0, (), common, shared),
        "upstream": ServerPlan(
            "eagle3-upstream", "upstream", steps, tuple(stock), common + speculative, shared
        ),
        "fork": ServerPlan("eagle3-fork", "fork", steps, (), common + speculative, shared),
    }
    unknown = [name for name in names if name not in known]
    if unknown:
        raise LaunchError(f"unknown server {unknown[0]!r}; known are {', '.join(known)}")
    return [known[name] for name in names]


def forth_and_back(items: Sequence[ServerPlan], once: bool = False) -> list[ServerPlan]:
    """A B C C B A, or A B C when ``once``."""
    return list(items) if once else [*items, *reversed(items)]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningServer:
    """A server process; a context manager that ends with the process gone."""

    def __init__(self, plan: ServerPlan, log: Path, baseline: Path, limit_s: float = 900.0) -> None:
        self.plan = plan
        self.port = free_port()
        self.client = Client(f"http://127.0.0.1:{self.port}")
        self.startup_s = 0.0
        self._log = log
        self._limit_s = limit_s
        environment = {**os.environ, **plan.environment, BASELINE_VARIABLE: str(baseline)}
        environment.pop("SGLANG_FORK_DISABLE", None)
        if plan.topics_off:
            environment["SGLANG_FORK_DISABLE"] = ",".join(plan.topics_off)
        self._environment = environment

    @property
    def command(self) -> list[str]:
        """The command line."""
        head = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        return [*head, *self.plan.arguments]

    def __enter__(self) -> RunningServer:
        begin = time.monotonic()
        with self._log.open("w", encoding="utf-8") as log:
            log.write(f"# {shlex.join(self.command)}\n")
            log.flush()
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        while not self.client.healthy():
            if self._process.poll() is not None:
                raise LaunchError(
                    f"server {self.plan.name} ended with status {self._process.returncode}\n{self._tail()}"
                )
            if time.monotonic() - begin > self._limit_s:
                self._end()
                raise LaunchError(
                    f"server {self.plan.name} not healthy after {self._limit_s:.0f} s\n{self._tail()}"
                )
            time.sleep(0.5)
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """Ask, then end the session that the server was started in; workers go with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        # Workers that outlived their parent hold its GPU memory and the next start would fail.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def _tail(self, lines: int = 30) -> str:
        try:
            return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
