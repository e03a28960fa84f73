"""A real server as a child process, with bounded waits, on a port of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TARGET, DRAFT = ROOT / "models/nano", ROOT / "models/nano-eagle3"
START_LIMIT_S = 300.0
STOP_LIMIT_S = 30.0
REQUEST_LIMIT_S = 120.0

EAGLE = (
    "--speculative-algorithm EAGLE3 --speculative-num-steps 2 --speculative-eagle-topk 1 "
    f"--speculative-num-draft-tokens 3 --speculative-draft-model-path {DRAFT}"
).split()
# float32, so that a verify of three rows and a decode of one round alike up to the last bits. Plain decoding
# runs without overlap because upstream's overlapped penalties lag one token (docs/semantics.md).
COMMON = (
    "--device cpu --dtype float32 --disable-overlap-schedule --enable-custom-logit-processor "
    "--enable-return-hidden-states --context-length 256 --max-total-tokens 4096 --max-running-requests 16 "
    "--log-level warning"
).split()


@dataclass(frozen=True)
class Answer:
    """Status and decoded body; ``body`` is text where it is not JSON."""

    status: int
    body: Any


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """``with Server(arguments, log) as server: server.post("/generate", body)``.

    Attributes:
        arguments: what follows ``--model-path TARGET`` and ``COMMON`` on the command line.
        log: file for the server's output.
        environment: variables added to the caller's.
        paths: folders put in front of PYTHONPATH.
    """

    arguments: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    paths: Sequence[Path] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.port = free_port()
        paths = [*map(str, self.paths), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= self.environment
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET)]
        command += ["--port", str(self.port), *COMMON, *self.arguments]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if not self.alive():
                raise RuntimeError(f"the server ended while it started:\n{self.tail()}")
            try:
                if self.get("/health_generate").status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise TimeoutError(f"the server was not ready within {START_LIMIT_S} s:\n{self.tail()}")

    def alive(self) -> bool:
        """Whether the parent process still runs."""
        return self.process is not None and self.process.poll() is None

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the process group: politely, then not."""
        if self.process is None:
            return
        for number, limit in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, STOP_LIMIT_S)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(limit)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        try:
            # The parent is gone; its children, if any, share the group.
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process = None

    def url(self, path: str) -> str:
        """Absolute address of a path."""
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str, limit_s: float = REQUEST_LIMIT_S) -> Answer:
        """GET, with the status as a value and not as an exception."""
        return self._send(urllib.request.Request(self.url(path)), limit_s)

    def post(self, path: str, body: Any, limit_s: float = REQUEST_LIMIT_S) -> Answer:
        """POST of a JSON body."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        return self._send(request, limit_s)

    def _send(self, request: urllib.request.Request, limit_s: float) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as response:
                return Answer(response.status, _decoded(response.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _decoded(error.read()))

    def stream(self, path: str, body: Any) -> list[Any]:
        """POST with ``stream``; the decoded pieces in order."""
        data = json.dumps(body | {"stream": True}).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        pieces = []
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    pieces.append(json.loads(line[6:]))
        return pieces

    def used_tokens(self) -> int:
        """KV slots that are neither free nor evictable: 0 on an idle server."""
        state = self.get("/server_info").body["internal_states"][0]
        used: int = state["memory_usage"].get("token_usage", 0) if "memory_usage" in state else 0
        return used


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
