"""Starts servers on the same machine, one after the other, forth and back, or all at once.

The order A B C C B A gives each server two starts, an early and a late one: a machine that warms up or
throttles then shows as a difference between two runs of the same server, and not as a difference between
servers. Small models fit together: then each server starts once, and the order is that of the measurements.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from sglang.bench_verify.client import Client
from sglang.bench_verify.errors import BenchError
from sglang.srt.speculative.stats.baseline import VARIABLE as BASELINE_VARIABLE
from sglang.verify_demo.process import Server, ServerError, free_port

SERVERS = ("baseline", "upstream", "fork")


class LaunchError(BenchError):
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


# A bench of speculation measures it also where it loses; further server arguments may say otherwise.
MEASURED = ("--speculative-auto", "off")


def plans(
    model: str,
    draft: str,
    steps: int | Sequence[int],
    names: Sequence[str],
    stock: Sequence[str],
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    off: Sequence[str] = (),
) -> list[ServerPlan]:
    """Server plans by name: ``baseline`` (no speculation), ``upstream`` (topics off), ``fork``.

    Args:
        steps: draft steps; of several, each speculating server is planned once a length.
        stock: topics to switch off for stock behaviour.
        extra: further server arguments, for every server.
        off: topics switched off in every server, the baseline included.

    Raises:
        LaunchError: a name that is no server, or one that is given twice.
    """
    lengths = [steps] if isinstance(steps, int) else list(steps)
    common = ("--model-path", model, *extra)
    shared, topics = dict(environment or {}), tuple(off)
    found: list[ServerPlan] = []
    for name in names:
        if name not in SERVERS:
            raise LaunchError(f"unknown server {name!r}; known are {', '.join(SERVERS)}")
        if name == "baseline":
            found.append(ServerPlan("baseline", "fork", 0, topics, common, shared))
            continue
        hidden = tuple(dict.fromkeys((*stock, *topics))) if name == "upstream" else topics
        for length in lengths:
            title = f"eagle3-{name}" + (f"-{length}" if len(lengths) > 1 else "")
            arguments = MEASURED + common + speculation(draft, length)
            found.append(ServerPlan(title, name, length, hidden, arguments, shared))
    titles = [plan.name for plan in found]
    if twice := next((title for title in titles if titles.count(title) > 1), ""):
        raise LaunchError(f"server {twice} is asked for twice: name each server and length once")
    return found


def speculation(draft: str, steps: int) -> tuple[str, ...]:
    """Server arguments of an EAGLE-3 chain of ``steps`` draft steps."""
    return (
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


def forth_and_back(items: Sequence[ServerPlan], once: bool = False) -> list[ServerPlan]:
    """A B C C B A, or A B C when ``once``."""
    return list(items) if once else [*items, *reversed(items)]


class RunningServer:
    """A healthy server of a plan, for the length of a ``with`` block; afterwards its processes are gone."""

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
        self._given_up = threading.Event()

    @property
    def command(self) -> list[str]:
        """The command line."""
        head = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        return [*head, *self.plan.arguments]

    def __enter__(self) -> RunningServer:
        begin = time.monotonic()
        self._server = Server(self.command, self._log, self._environment, watch_memory=False)
        self._server.__enter__()
        try:
            while not self.client.healthy():
                try:
                    self._server.check()
                except ServerError as error:
                    raise LaunchError(f"server {self.plan.name}: {error}") from error
                if time.monotonic() - begin > self._limit_s:
                    raise LaunchError(
                        f"server {self.plan.name} not healthy after {self._limit_s:.0f} s\n{self._server.tail(30)}"
                    )
                if self._given_up.wait(0.5):
                    raise LaunchError(f"server {self.plan.name}: the start was given up")
        except BaseException:  # also an interrupt: without this block's end nobody else would stop the server
            self._server.stop()
            raise
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()

    def give_up(self) -> None:
        """End a start that another thread waits for; that thread stops the server and raises LaunchError."""
        self._given_up.set()

    def why(self, error: Exception) -> LaunchError:
        """The error of a request with the end of the server's log, where the reason stands if it has died."""
        try:
            self._server.check()
        except ServerError as ended:
            return LaunchError(f"server {self.plan.name}: {ended}\n({error})")
        return LaunchError(f"server {self.plan.name}: {error}\n{self._server.tail(20)}")


@contextmanager
def together(servers: Sequence[RunningServer]) -> Iterator[Sequence[RunningServer]]:
    """All servers up for the length of a ``with`` block; they start side by side.

    Raises:
        LaunchError: one did not come up; the others are stopped before it is raised.
    """
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(servers))) as pool:
        starts = [pool.submit(server.__enter__) for server in servers]
        try:
            for start in as_completed(starts):
                start.result()
        except BaseException:
            # Also an interrupt: the pool's end would wait for every start, a quarter of an hour for one that hangs.
            for server in servers:
                server.give_up()
            raise
        finally:
            wait(starts)
            for server, start in zip(servers, starts, strict=True):
                if start.exception() is None:
                    stack.push(server)
        yield servers
