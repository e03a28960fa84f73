"""``docker/healthcheck.py`` against what may answer: one line and status 0 or 1, whatever it is."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "docker" / "healthcheck.py"
LIMIT_S = 30


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A port where every connection gets these bytes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(LIMIT_S)


def check(**environment: str) -> tuple[int, str]:
    """Status and output; nothing may be said on standard error."""
    done = subprocess.run(
        [sys.executable, str(CHECK)],
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stderr == "" and done.stdout.count("\n") == 1, (done.stdout, done.stderr)
    return done.returncode, done.stdout.strip()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    ("reply", "status", "says"),
    [
        (OK, 0, "healthy"),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", 1, "answers 503"),
        (b"HTTP/1.1 500 x\r\n\r\n", 1, "answers 500"),
        (b"garbage\r\n\r\n", 1, "unhealthy"),
        (b"", 1, "unhealthy"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", 1, "unhealthy"),
        (b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n", 1, "answers 302"),
    ],
    ids=["ok", "503", "500", "no http", "hung up", "no body", "elsewhere"],
)
def test_answers(reply: bytes, status: int, says: str) -> None:
    with answering(reply) as port:
        code, text = check(PORT=str(port), SGLANG_HEALTH_CHECK_TIMEOUT="5")
    assert code == status and says in text


def test_nobody_listens_and_nobody_answers() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert check(PORT=str(held.getsockname()[1]))[0] == 1
        # Taken, and never answered: the limit of the server and the margin.
        held.listen()
        code, text = check(PORT=str(held.getsockname()[1]), SGLANG_HEALTH_CHECK_TIMEOUT="0.01")
    assert code == 1 and "timed out" in text


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PORT": "http"}, "PORT=http is no number"),
        ({"PORT": "70000"}, "PORT=70000 is no port"),
        ({"PORT": "1.5"}, "PORT=1.5 is no port"),
        ({"PORT": "-1"}, "no number above 0"),
        ({"SGLANG_HEALTH_CHECK_TIMEOUT": "long"}, "SGLANG_HEALTH_CHECK_TIMEOUT=long is no number"),
        ({"SGLANG_HEALTH_CHECK_TIMEOUT": "nan"}, "no number"),
        ({"SGLANG_HEALTH_CHECK_TIMEOUT": "inf"}, "no number"),
        ({"HEALTH_HOST": "no such host", "PORT": "1"}, "unhealthy"),
        ({"HEALTH_HOST": "[", "PORT": "1"}, "unhealthy"),
    ],
)
def test_odd_settings(environment: dict[str, str], says: str) -> None:
    code, text = check(**environment)
    assert code == 1 and says in text


def test_unset_and_empty_are_the_same() -> None:
    """As the entrypoint takes them: an empty PORT serves on 30000."""
    code, text = check(
        PORT="", SGLANG_HEALTH_CHECK_TIMEOUT="", HEALTH_HOST="", HTTP_PROXY="http://127.0.0.1:1"
    )
    assert "http://127.0.0.1:30000/" in text or (code, text) == (0, "healthy")
