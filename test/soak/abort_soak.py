"""Many clients, most of which leave early: does anything stay behind?

    python test/soak/abort_soak.py --minutes 10

Starts an EAGLE-3 server on the CPU with the shipped model and keeps ``--clients`` requests on it. A client reads its
answer to the end, or drops the connection after some pieces, or has its request aborted by id. Answers that were
read to the end must be what the same request said undisturbed before: a wrong neighbour shows there. At the end the
server must be idle within 5 s, own every KV slot again, and consist of the same living processes. Prints one JSON line; the exit status says if all held.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from differential.cases import PROMPTS
from differential.servers import Asked, eagle_server

GENERATE = "/generate"
IDLE_LIMIT_S = 5.0


def bodies() -> list[dict[str, Any]]:
    """Requests of different lengths and kinds, all with one right answer."""
    out = []
    for number, prompt in enumerate(PROMPTS[:6]):
        parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12 + 17 * number}
        if number % 3 == 1:
            parameters |= {"temperature": 1.0, "sampling_seed": number}
        if number % 3 == 2:
            parameters |= {"frequency_penalty": 0.7, "min_new_tokens": 9}
        out.append({"text": prompt, "sampling_params": parameters})
    return out


class Soak:
    """The clients and what they saw."""

    def __init__(self, server: Asked, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.bodies = bodies()
        self.right = [server.ask(GENERATE, body).body["output_ids"] for body in self.bodies]
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int, until: float) -> None:
        """One client, request after request, until the time is up."""
        chance = random.Random(self.seed * 1000 + number)
        turn = 0
        while time.monotonic() < until and not self.errors:
            turn += 1
            which = chance.randrange(len(self.bodies))
            way = chance.choice(["read", "drop", "drop", "abort"])
            try:
                getattr(self, way)(which, f"{number}-{turn}-", chance)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with self._lock:
                    self.errors.append(f"client {number}, turn {turn}, {way}: {error!r}")
            with self._lock:
                self.counts[way] += 1

    def read(self, which: int, rid: str, chance: random.Random) -> None:
        """Read to the end and compare."""
        answer = self.server.ask(GENERATE, self.bodies[which] | {"rid": rid}).body
        if answer["output_ids"] != self.right[which]:
            with self._lock:
                self.wrong.append(
                    {"body": self.bodies[which], "right": self.right[which], "said": answer["output_ids"]}
                )

    def drop(self, which: int, rid: str, chance: random.Random) -> None:
        """Close the connection after 0 to 3 pieces."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        body = self.bodies[which] | {"rid": rid, "stream": True}
        connection.request("POST", GENERATE, json.dumps(body), {"Content-Type": "application/json"})
        pieces = chance.randrange(4)
        if pieces:
            response = connection.getresponse()
            for _ in range(2 * pieces):
                response.readline()
        connection.close()

    def abort(self, which: int, rid: str, chance: random.Random) -> None:
        """Have the request aborted by its id while it runs."""
        delay = threading.Timer(chance.random() * 0.4, self.server.ask, ("/abort_request", {"rid": rid}))
        delay.start()
        answer = self.server.ask(GENERATE, self.bodies[which] | {"rid": rid})
        delay.join(60)
        said = answer.body.get("output_ids") if isinstance(answer.body, dict) else None
        if said is not None and said != self.right[which][: len(said)]:
            with self._lock:
                self.wrong.append({"body": self.bodies[which], "right": self.right[which], "said": said})


def soak(server: Asked, *, seconds: float, clients: int, seed: int = 1) -> dict[str, Any]:
    """Run the clients for ``seconds`` and look at what stays; the report's ``held`` is the verdict."""
    server.flush_cache()
    before = server.load()
    processes = server.processes()
    run = Soak(server, seed)
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=run.client, args=(n, until), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 150)
    stuck = sum(thread.is_alive() for thread in threads)
    ended = time.monotonic()
    while True:
        load = server.load()
        busy = load["num_running_reqs"] + load["num_waiting_reqs"] + load["num_used_tokens"]
        idle_after = time.monotonic() - ended
        if not busy or idle_after > IDLE_LIMIT_S:
            break
        time.sleep(0.1)
    server.flush_cache()
    after = server.load()
    return {
        "seconds": seconds,
        "clients": clients,
        "requests": sum(run.counts.values()),
        "ways": dict(run.counts),
        "wrong": run.wrong[:3],
        "wrong_answers": len(run.wrong),
        "client_errors": run.errors[:3],
        "clients_stuck": stuck,
        "idle_after_s": round(idle_after, 2),
        "left_behind": busy,
        # Living processes of the server that were not there before, and that are gone or zombies.
        "processes_changed": sorted(processes ^ server.processes()),
        "kv_before": before["num_used_tokens"],
        "kv_after": after["num_used_tokens"],
        "held": not (
            run.wrong
            or run.errors
            or stuck
            or busy
            or processes != server.processes()
            or after["num_used_tokens"] != before["num_used_tokens"]
        ),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--overlap", action="store_true", help="the scheduler's loop of GPU servers")
    parser.add_argument(
        "--flag", action="append", default=[], help="one more of the server, as --flag=--NAME=VALUE"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--page-size={options.page_size}", "--chunked-prefill-size=32", "--max-total-tokens=2048"]
        flags += options.flag
        with eagle_server(Path(folder), *flags, overlap=options.overlap) as server:
            report = soak(server, seconds=60 * options.minutes, clients=options.clients, seed=options.seed)
            print(json.dumps(report))
            if not report["held"]:
                print(server.log_tail(), file=sys.stderr)
    return 0 if report["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
