"""The same answers when the scheduler gets in the way: overlap, pages of 16, prefill in chunks, retraction, aborts.

An EAGLE-3 server whose pool is small, which retracts on purpose and whose scheduler overlaps like a GPU server's; the
reference is the plain server of the session (no overlap, pages of 1, no chunks, a large pool), so every difference
is the scheduling's. The slow form runs it without overlap too, as CPU servers do.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .cases import GENERATE, PROMPTS
from .conftest import Asked
from .pair import ask, findings
from .servers import Asked as Server
from .servers import eagle_server

pytestmark = pytest.mark.server
FLAGS = ("--page-size=16", "--chunked-prefill-size=32", "--max-total-tokens=1024")
FREE_LIMIT_S = 120.0
# A request that ends by its length only.
LONG: dict[str, Any] = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlap", "plain loop"]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, asked: Asked
) -> Iterator[Server]:
    # ``asked`` comes first, so that its servers are gone.
    folder = tmp_path_factory.mktemp("scheduling")
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in retract.items():
            patch.setenv(name, value)
        with eagle_server(folder, *FLAGS, overlap=request.param) as running:
            yield running


def idle(server: Server, limit_s: float = FREE_LIMIT_S) -> dict[str, Any]:
    """Wait until nothing runs, waits or holds KV; the last load seen."""
    deadline = time.monotonic() + limit_s
    while True:
        load = server.load()
        busy = load["num_running_reqs"] + load["num_waiting_reqs"] + load["num_used_tokens"]
        if not busy or time.monotonic() > deadline:
            return load
        time.sleep(0.1)


def assert_idle(server: Server) -> None:
    load = idle(server)
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0), load


def test_answers_are_the_same(server: Server, asked: Asked) -> None:
    """F3, F4: retracted and resumed requests included; how often that happened is checked."""
    # Hidden states and prompt log probabilities of a retracted request are upstream's affair: it repeats them.
    wanted = [
        at
        for at, case in enumerate(asked.cases)
        if case.path == GENERATE and not {"return_hidden_states", "return_logprob"} & case.body.keys()
    ]
    cases = [asked.cases[at] for at in wanted]
    answers = ask(server, cases)
    found = findings(cases, [asked.plain[at] for at in wanted], answers)
    assert not found, "\n".join(map(str, found[:8]))
    metas = [a["body"].get("meta_info", {}) for a in answers if isinstance(a["body"], dict)]
    assert sum(meta.get("num_retractions", 0) for meta in metas) > 5
    assert_idle(server)


def test_shared_prefixes_and_flushes(server: Server) -> None:
    """Requests that share a long prefix, in bursts with a flush between them, say the same each time."""
    prompt = PROMPTS[-1]
    bodies = [
        {"text": prompt + tail, "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
        for tail in ("One", "Rose", "One day", "")
    ]
    said = []
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            said.append(list(pool.map(lambda body: server.ask(GENERATE, body).body["output_ids"], bodies)))
        assert_idle(server)
        server.flush_cache()
    assert said[0] == said[1] == said[2]


def drop_after_first_piece(server: Server, body: dict[str, Any]) -> None:
    """Stream, read one piece, and close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(
        "POST", GENERATE, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    response.readline()
    connection.close()


def verifies(server: Server) -> int:
    """Verify steps of all requests so far, one a request and cycle."""
    return sum(server.get("/server_info")["internal_states"][0]["spec_stats"]["kept_histogram"])


def test_dropped_connections_free_everything(server: Server) -> None:
    """F2: fifty clients leave after the first piece, and nothing is left of them long before they would have ended.

    In steps and not in seconds, which depend on the machine; ``test/soak/abort_soak.py`` allows five.
    """
    clients, before = 50, verifies(server)
    body = {"text": PROMPTS[0], "sampling_params": LONG}
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: drop_after_first_piece(server, body), range(clients)))
    assert_idle(server)
    # A chain of 3 keeps at most 3 a step.
    assert verifies(server) - before < clients * LONG["max_new_tokens"] / 3 / 2


def test_abort_by_id_leaves_the_neighbour_alone(server: Server) -> None:
    """One of two running requests is aborted; the other's text is that of an undisturbed run."""
    body = {"text": PROMPTS[1], "sampling_params": LONG | {"max_new_tokens": 60}}
    undisturbed = server.ask(GENERATE, body).body["output_ids"]
    answers: dict[str, Any] = {}

    def run(rid: str) -> None:
        answers[rid] = server.ask(GENERATE, body | {"rid": rid}).body

    threads = [threading.Thread(target=run, args=(rid,)) for rid in ("leave", "stay")]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    server.ask("/abort_request", {"rid": "leave"})
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    assert answers["stay"]["output_ids"] == undisturbed
    left = answers["leave"]
    ended = left["meta_info"]["finish_reason"]["type"] if "meta_info" in left else "abort"
    assert ended in ("abort", "length")
    assert_idle(server)


STATEFUL: tuple[dict[str, Any], ...] = (
    {"regex": "[ab ]{150,190}", "frequency_penalty": 0.4},
    {"frequency_penalty": 1.2, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_new_tokens": 150},
    {"temperature": 1.0, "sampling_seed": 8, "top_p": 0.9, "regex": "[a-z ]{150,190}"},
)


@pytest.mark.parametrize("sampling", STATEFUL, ids=["grammar", "penalties", "grammar and seed"])
def test_what_a_request_carries_survives_retraction(server: Server, sampling: dict[str, Any]) -> None:
    """A grammar's state, a penaliser's history, a seed's position: twelve that do not fit the pool at once agree with one alone."""
    body = {"text": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 180} | sampling}
    alone = server.ask(GENERATE, body).body["output_ids"]
    with ThreadPoolExecutor(12) as pool:
        answers = [each.body for each in pool.map(lambda _: server.ask(GENERATE, body), range(12))]
    assert [answer["output_ids"] for answer in answers] == [alone] * 12
    assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0
    assert_idle(server)


def test_abort_in_the_middle_of_a_grammar(server: Server) -> None:
    """A request inside its grammar is aborted; its neighbour with the same grammar goes on, and so does the next."""
    body = {
        "text": PROMPTS[1],
        "sampling_params": {"temperature": 0, "max_new_tokens": 60, "regex": "[ab ]{40,60}"},
    }
    undisturbed = server.ask(GENERATE, body).body["output_ids"]
    for turn in range(3):
        answers: dict[str, Any] = {}

        def run(rid: str, into: dict[str, Any] = answers) -> None:
            into[rid] = server.ask(GENERATE, body | {"rid": rid}).body

        threads = [threading.Thread(target=run, args=(rid,)) for rid in (f"leaves {turn}", f"stays {turn}")]
        for thread in threads:
            thread.start()
        time.sleep(0.2 + 0.1 * turn)
        server.ask("/abort_request", {"rid": f"leaves {turn}"})
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive()
        assert answers[f"stays {turn}"]["output_ids"] == undisturbed
    assert server.ask(GENERATE, body).body["output_ids"] == undisturbed
    assert_idle(server)


def test_a_flush_under_load_changes_nothing(server: Server) -> None:
    """A busy server refuses the flush; whatever is answered, the texts under way stay as they were."""
    bodies_ = [
        {"text": f"{n} {PROMPTS[0]}", "sampling_params": LONG | {"max_new_tokens": 40}} for n in range(6)
    ]
    undisturbed = [server.ask(GENERATE, body).body["output_ids"] for body in bodies_]
    with ThreadPoolExecutor(6) as pool:
        under_way = [pool.submit(server.ask, GENERATE, body) for body in bodies_]
        flushes = []
        while not all(each.done() for each in under_way):
            flushes.append(server.ask("/flush_cache", {}).status)
            time.sleep(0.05)
        assert [each.result().body["output_ids"] for each in under_way] == undisturbed
    assert flushes and set(flushes) <= {200, 400}
    assert_idle(server)
    server.flush_cache()


def test_more_than_the_pool_holds(server: Server) -> None:
    """F3: requests whose sum passes the pool several times over all come to their end."""
    bodies = [{"text": f"{n} {PROMPTS[0]}", "sampling_params": LONG} for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: server.ask(GENERATE, body), bodies))
    assert [a.body["meta_info"]["completion_tokens"] for a in answers] == [200] * 12
    assert_idle(server)
