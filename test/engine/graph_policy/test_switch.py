"""Switching between cycles and plain steps on a real server: text, KV and counts stay right.

The scheduler overlaps as on a GPU, the switch changes every three steps, the draft's KV starts as NaN. With the
draft's rows kept whole, acceptance is what it is without a single switch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import poisoned_draft_kv
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from differential.servers import Asked, eagle_server, plain_server
from plugin_entry import declare
from sglang.srt.speculative.stats.accept import histogram_faults

pytestmark = pytest.mark.server

PREAMBLE = "A preamble that several of these share, so that the prefix cache has something to give. "
PROMPTS = [
    "Hello",
    PREAMBLE + "First.",
    "One, two, three, four, five,",
    PREAMBLE + "Second, which is longer than the first: 0123456789.",
    "def add(a, b):",
    PREAMBLE,
    "Once upon a time there was a hedgehog",
    "The capital of France is",
]
LENGTHS = (61, 1, 40, 2, 23, 61, 3, 7)


@contextmanager
def switching(folder: Path, every: int, *flags: str) -> Iterator[Asked]:
    """An EAGLE-3 server that switches every so many steps; 0 is never."""
    declare(folder / "plugin", poisoned_draft_kv.ENTRY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_SPEC_AUTO_SCRIPT", str(every) if every else "")
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parent), *filter(None, [_python_path()])]))
        with eagle_server(
            folder, "--speculative-auto=on", *flags, overlap=True, plugins=(poisoned_draft_kv.ENTRY,)
        ) as server:
            assert poisoned_draft_kv.MARK in server.log.read_text(errors="replace")
            yield server


def _python_path() -> str:
    import os

    return os.environ.get("PYTHONPATH", "")


def answers(server: Asked) -> list[dict[str, Any]]:
    """Two rounds, four requests at a time: the second finds what the first left in the prefix cache."""

    def one(job: tuple[str, int]) -> dict[str, Any]:
        prompt, length = job
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
        }
        answer = server.ask("/generate", body)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.body
        return found

    jobs = list(zip(PROMPTS, LENGTHS, strict=True))
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(one, jobs))
        # What the first answers said goes on as a prompt: its tokens are in the cache, and so must be the draft's.
        grown = [(prompt + answer["text"], 30) for (prompt, _), answer in zip(jobs, first, strict=True)]
        return first + list(pool.map(one, grown))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Answers without speculation."""
    with plain_server(tmp_path_factory.mktemp("plain")) as server:
        return answers(server)


@pytest.fixture(scope="module", params=[("--page-size=1",), ("--page-size=16", "--chunked-prefill-size=32")])
def switched(
    request: pytest.FixtureRequest, plain: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Answers, the server's state, and its load once all is done and flushed."""
    with switching(tmp_path_factory.mktemp("switching"), 3, *request.param) as server:
        found = answers(server)
        state = server.get("/server_info")["internal_states"][0]
        server.ask("/flush_cache", {})
        deadline = time.monotonic() + 120
        while (load := server.load())["num_used_tokens"] and time.monotonic() < deadline:
            time.sleep(0.1)
        return found, state, load


def test_text_is_that_of_plain_decoding(plain: list[dict[str, Any]], switched: Any) -> None:
    for expected, found in zip(plain, switched[0], strict=True):
        assert found["text"] == expected["text"]


def test_both_modes_ran_and_add_up(switched: Any) -> None:
    mixed = 0
    for answer in switched[0]:
        info = answer["meta_info"]
        steps = (info.get("spec_cycle") or {}).get("plain_steps", 0)
        verifies, drafts = info.get("spec_verify_ct", 0), info.get("spec_num_correct_drafts", 0)
        histogram = info.get("spec_correct_drafts_histogram", [])
        # Requests that end inside a run keep less than was accepted; lengths here end at a bonus or a draft alike.
        assert histogram_faults(histogram, verifies, drafts, info["completion_tokens"], steps) == []
        mixed += bool(steps and verifies)
    assert mixed >= 8


def test_acceptance_is_what_it_is_without_switches(switched: Any) -> None:
    """NaN in a row that the draft reads would make every draft after it worthless."""
    state = switched[1]
    assert state["spec_stats"]["kept_length"] > 1.9
    assert state["spec_stats"]["counters"]["spec_auto_caught_up_rows"] > 50


def test_the_switch_is_reported(switched: Any) -> None:
    auto = switched[1]["speculative_auto"]
    counters = switched[1]["spec_stats"]["counters"]
    assert auto["switches"] > 10 and auto["ring_rows"] >= 4
    assert (
        counters['spec_auto_switches{to="plain"}'] + counters['spec_auto_switches{to="speculate"}']
        == (auto["switches"])
    )
    assert counters['spec_auto_steps{mode="plain"}'] > 30


def test_no_kv_is_left(switched: Any) -> None:
    assert switched[2]["num_used_tokens"] == 0 and switched[2]["num_running_reqs"] == 0
