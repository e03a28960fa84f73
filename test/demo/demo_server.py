"""Stands in for the server in tests of the demo: the HTTP surface it uses, and a child that ignores SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
TOKENS = [11, 12, 13, 14, 15]


def meta(speculative: bool) -> dict[str, Any]:
    cycle = {"timed_cycles": 2, "cycle_ms": 9.0, "draft_ms": 2.0, "verify_ms": 5.0}
    return {"spec_correct_drafts_histogram": [1, 0, 1], "spec_cycle": cycle} if speculative else {}


class Handler(BaseHTTPRequestHandler):
    speculative = False
    wrong = False

    def log_message(self, *args: object) -> None:
        pass

    def send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send("text/plain", b"")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chat = "messages" in asked
        tokens = [*TOKENS[:3], 99, *TOKENS[4:]] if self.wrong and self.speculative else TOKENS
        if asked.get("stream"):
            lines = []
            for word in ("one ", "two ", ""):
                choice = {"index": 0, "delta": {"content": word}} if chat else {"index": 0, "text": word}
                chunk = {"id": "x", "object": "chunk", "created": 0, "model": "m", "choices": [choice]}
                if not word:
                    chunk |= {
                        "choices": [],
                        "usage": {"completion_tokens": 5, "prompt_tokens": 1, "total_tokens": 6},
                    }
                lines.append(f"data: {json.dumps(chunk)}\n\n")
            self.send("text/event-stream", ("".join(lines) + "data: [DONE]\n\n").encode())
        elif chat:
            choice = {
                "message": {"content": "one two"},
                "token_ids": tokens,
                "meta_info": meta(self.speculative),
            }
            self.send("application/json", json.dumps({"choices": [choice]}).encode())
        else:
            body = {"text": "one two", "output_ids": tokens, "meta_info": meta(self.speculative)}
            self.send("application/json", json.dumps(body).encode())


def main() -> None:
    port, mode, speculative = int(sys.argv[1]), sys.argv[2], "EAGLE3" in sys.argv
    subprocess.Popen([sys.executable, "-c", STUBBORN])
    print(f"fake server on {port}, mode {mode}", flush=True)
    if mode == "dies":
        print("the model is missing", flush=True)
        sys.exit(3)
    if mode == "hangs":
        time.sleep(600)
    Handler.speculative, Handler.wrong = speculative, mode == "wrong"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
