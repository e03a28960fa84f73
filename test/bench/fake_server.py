"""A stand-in for a speculating server: HTTP, counts and phases of a chain of 3 that keeps 2 a cycle."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """A server that speculates 3 tokens and keeps 2 a cycle."""

    cycles = 0

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Health and state."""
        if self.path == "/health":
            self._send({})
        elif self.path == "/server_info":
            n = Handler.cycles
            statistics = {
                "kept_histogram": [0, n],
                "phase_totals": {"verify": [2.0 * n, n], "draft": [1.0 * n, n], "host_gap": [0.5 * n, n]},
                "ranks": [{"rank": 0, "pid": 1, "variables": {"NCCL_PROTO": "LL"}}],
                "fork": {"version": "v", "base": "b", "topics": {"verify-stats": "applied"}},
            }
            state = {
                "model_path": "/srv/models/kimi",
                "tp_size": 8,
                "speculative_algorithm": "EAGLE3",
                "speculative_num_draft_tokens": 3,
                "spec_stats": statistics,
            }
            self._send({"internal_states": [state]})
        else:
            self.send_error(404, "no such path")

    def do_POST(self) -> None:
        """Answer 21 tokens in 10 cycles."""
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        Handler.cycles += 10
        if self.path == "/generate":
            info = {"completion_tokens": 21, "prompt_tokens": 5, "finish_reason": {"type": "stop"}}
            self._send({"text": "x", "output_ids": [1, 2] * 40, "meta_info": info})
        elif body["messages"][0]["content"] == "fail":
            self.send_error(500, "broken")
        else:
            choice = {"message": {"content": " ".join(map(str, range(60)))}, "finish_reason": "stop"}
            self._send({"choices": [choice], "usage": {"completion_tokens": 21, "prompt_tokens": 7}})

    def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler] = Handler) -> Iterator[str]:
    """The address of a server that answers with ``handler``, for the length of the block."""
    Handler.cycles = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
