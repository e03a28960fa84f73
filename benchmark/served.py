"""A real server for a bench: starts it, sends it batches and raw bodies, and always takes it down again.

The process is ``sglang.verify_demo.process.Server``, as in the demo and in ``bench_verify``; what is added here is waiting
for a generation to work, and requests that those do not make. Every wait has a limit, and a server that dies while
starting fails with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang.verify_demo import process
from sglang.verify_demo.process import Server, free_port, proportional_bytes, session_members

__all__ = ["Generation", "Served", "ServerError", "speculative_flags"]


class ServerError(RuntimeError):
    """The server did not start, died, or answered with an error."""


@dataclass(frozen=True)
class Generation:
    """One answer: token ids, text, and the server's `meta_info`."""

    ids: tuple[int, ...]
    text: str
    meta: Mapping[str, Any]


def speculative_flags(draft: Path, *, steps: int = 2, topk: int = 1, tokens: int = 3) -> list[str]:
    """Return the flags of EAGLE-3 with this draft; the default is a chain of 3."""
    return [
        "--speculative-algorithm=EAGLE3",
        f"--speculative-draft-model-path={draft}",
        f"--speculative-num-steps={steps}",
        f"--speculative-eagle-topk={topk}",
        f"--speculative-num-draft-tokens={tokens}",
    ]


class Served:
    """A `python -m sglang.launch_server` in a session of its own.

    Use as a context manager. `start_seconds` is the time from the start of the process to its first healthy answer.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        start_limit: float = 900.0,
    ) -> None:
        self.port = free_port()
        self.command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            f"--model-path={model}",
            "--host=127.0.0.1",
            f"--port={self.port}",
            # By itself the server asks the kernel for one, lets go of it, and binds it when the model's code is loaded.
            f"--nccl-port={free_port()}",
            *flags,
        ]
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.start_limit = start_limit
        self.start_seconds = 0.0
        self._server: Server | None = None

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the server's log."""
        return self._server.tail(lines) if self._server is not None else ""

    def start(self) -> None:
        """Start the server and wait until it generates.

        Raises:
            ServerError: it ended, or was not healthy within `start_limit` seconds.
        """
        began = time.monotonic()
        server = self._server = Server(self.command, self.log, self.environment, watch_memory=False)
        try:
            server.__enter__()
            while True:
                try:
                    server.check()
                except process.ServerError as error:
                    raise ServerError(str(error)) from error
                if time.monotonic() - began > self.start_limit:
                    raise ServerError(f"not healthy after {self.start_limit:.0f} s:\n{self.log_tail()}")
                with contextlib.suppress(OSError, ServerError):
                    self._request("/health_generate", None, limit=20.0)
                    break
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def stop(self) -> None:
        """End the server's processes: first asked, then killed; returns when they are gone."""
        if self._server is not None:
            self._server.stop()

    def _request(self, path: str, body: Any, limit: float) -> Any:
        with self._open(path, body, limit) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _open(self, path: str, body: Any, limit: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=limit)
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')}"
            ) from error

    def post(self, path: str, body: Any, limit: float = 300.0) -> Any:
        """Send JSON and return the JSON answer."""
        return self._request(path, body, limit)

    def get(self, path: str, limit: float = 60.0) -> Any:
        """Return a JSON answer."""
        return self._request(path, None, limit)

    def events(self, path: str, body: Any, limit: float = 300.0) -> Iterator[Any]:
        """Send JSON and yield the JSON of each server-sent event."""
        with self._open(path, body, limit) as answer:
            for line in answer:
                text = line.decode().strip()
                if text.startswith("data:") and text != "data: [DONE]":
                    yield json.loads(text.removeprefix("data:"))

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        tokens: int,
        limit: float = 600.0,
        **sampling: Any,
    ) -> list[Generation]:
        """Answer all prompts (texts or token ids) as one batch; greedy unless `sampling` says otherwise."""
        name = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {
            name: list(prompts),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling},
        }
        answers = self.post("/generate", body, limit)
        return [Generation(tuple(a["output_ids"]), a["text"], a["meta_info"]) for a in answers]

    def flush_cache(self, limit: float = 30.0) -> None:
        """Empty the prefix cache, waiting up to `limit` seconds for the scheduler to be idle.

        An answer leaves before its batch does, and a busy scheduler refuses: one refusal is no fault, a lasting
        one is (a request that never ends) and raises ServerError.
        """
        deadline = time.monotonic() + limit
        while True:
            try:
                with self._open("/flush_cache", {}, limit) as answer:
                    answer.read()
                return
            except ServerError as error:
                if "Flush cache failed" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def processes(self) -> set[int]:
        """Ids of the server's living processes; one that has ended and not been waited for is not among them."""
        return set(session_members(self._server.pid)) if self._server is not None else set()

    def memory(self) -> dict[str, int]:
        """Return bytes: `peak_rss_sum` over the processes (shared pages counted in each), and `pss` of now."""
        pids = session_members(self._server.pid) if self._server is not None else []
        peak = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        peak += int(line.split()[1]) * 1024
        return {"peak_rss_sum": peak, "pss": proportional_bytes(pids)}
