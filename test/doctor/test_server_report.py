"""A running server, as the doctor shows it; the server is a small one that answers what a real one would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from sglang.verify_doctor import server
from sglang.verify_doctor.__main__ import main
from sglang.verify_doctor.findings import Level, worst

STATE: dict[str, Any] = {
    "clock": "device",
    "cycles": 1200,
    "cycle_ms": 3.2,
    "kept_length": 2.01,
    "phase_ms": {"draft": 0.4, "verify": 2.0},
    "alarm": False,
    "fallbacks": {"verify-attention": {"decode: head size 80": 12}},
    "counters": {'verify_attention_calls{mode="verify",path="fork"}': 732},
    "graph_replays": {"verify": 1190},
    "eager_passes": {"verify": 10},
    "graph_capture_s": {"decode": 4.5},
    "all_reduce": {"path": "NCCL"},
    "ranks": [
        {
            "rank": 0,
            "variables": {"NCCL_P2P_LEVEL": "SYS"},
            "differs": [],
            "nccl_log": {
                "version": "2.28.9",
                "settings": {"NCCL_P2P_LEVEL": "SYS"},
                "transports": {"P2P/IPC": 8},
                "warnings": [],
            },
        },
        {"rank": 1, "variables": {}, "differs": ["NCCL_P2P_LEVEL=SYS did not arrive"], "nccl_log": None},
    ],
    "fork": {"version": "0.5.17+verify.1", "base": "0.5.17", "topics": {"a": "applied", "b": "off"}},
}


@pytest.fixture
def answer() -> Iterator[Any]:
    """Set ``.content`` and ``.status``; ``.url`` is where it is served."""

    class Handler(BaseHTTPRequestHandler):
        content: ClassVar[Any] = {"internal_states": [{"spec_stats": STATE}]}
        status = 200
        url = ""

        def do_GET(self) -> None:
            body = self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()
            self.send_response(self.status if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    Handler.url = f"127.0.0.1:{running.server_port}"
    yield Handler
    running.shutdown()
    running.server_close()
    thread.join(5)


def test_everything_is_shown(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", answer.url]) == 0
    text = capsys.readouterr().out
    for part in (
        "1,200 cycles of 3.20 ms, 2.01 tokens kept each",
        "verify-attention: 12 times, decode: head size 80",
        "run eagerly: verify 10",
        "2 rank(s) see: NCCL_P2P_LEVEL=SYS",
        "rank 1: NCCL_P2P_LEVEL=SYS did not arrive",
        "by its own log: 2.28.9; read NCCL_P2P_LEVEL=SYS; connections P2P/IPC 8",
        "switched off: b",
        "the server runs, 2 warnings",
    ):
        assert part in text, part


def test_as_json(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", answer.url, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["document"] == "verify-doctor/2" and content["serving"] == "running"
    assert content["facts"]["server"]["states"][0]["cycles"] == 1200


def test_the_alarm_is_a_fault(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer.content = {"internal_states": [{"spec_stats": STATE | {"alarm": True}}]}
    assert main(["--server", answer.url]) == 1
    assert "accepts almost nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (200, b"<html>", "no JSON"),
        (200, {"other": 1}, "no server of this fork"),
        (401, {}, "SGLANG_API_KEY"),
        (500, {}, "500"),
    ],
)
def test_other_answers(
    answer: Any, status: int, content: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer.status, answer.content = status, content
    assert main(["--server", answer.url]) == 2
    assert says in capsys.readouterr().err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", "127.0.0.1:9"]) == 2
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("state", [{}, {"spec_stats": {}}, {"spec_stats": {"cycles": 0}}])
def test_a_server_that_says_little(state: dict[str, Any]) -> None:
    findings = server.judge({"states": [state.get("spec_stats", {})]})
    assert findings and worst(findings) in (Level.NOTE, Level.WARNING)
    assert server.judge({}) and server.judge({"states": []})


def test_replicas_are_told_apart() -> None:
    groups = {finding.group for finding in server.judge({"states": [STATE, STATE]})}
    assert {"server, replica 0", "server, replica 1"} <= groups
