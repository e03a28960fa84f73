"""The live controller in a real server: it leaves speculation while that loses and comes back when it wins.

Times are made up (``simulated_times``), all else is real: acceptance, batches, the draft that catches up, text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import simulated_times

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from differential.servers import Asked, eagle_server, plain_server

pytestmark = pytest.mark.server

PROMPTS = (
    "Once upon a time there was a hedgehog",
    "The capital of France is",
    "One, two, three, four, five,",
)
TOKENS, ROUNDS = 120, 3
# A plain step of 2 ms; a cycle of 9 ms keeps too little whatever the draft does, one of 2.1 ms wins by its first draft.
PLAIN_MS, LOSING_MS, WINNING_MS, CHANGE = 2.0, 9.0, 2.1, 120


@contextmanager
def server(folder: Path, times: str) -> Iterator[Asked]:
    """An EAGLE-3 server whose switch works on a CPU and sees ``times``."""
    simulated_times.install(folder / "plugin")
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_SPEC_AUTO_ON_CPU", "1")
        patch.setenv(simulated_times.VARIABLE, times)
        patch.syspath_prepend(here)
        patch.setenv("PYTHONPATH", here)
        flags = ("--speculative-auto=on", "--log-level=info")
        with eagle_server(folder, *flags, overlap=True, plugins=(simulated_times.ENTRY,)) as found:
            assert simulated_times.MARK in found.log.read_text(errors="replace")
            yield found


def texts(asked: Asked) -> list[str]:
    """One request after the other, so that the batch is always one."""
    found = []
    for _ in range(ROUNDS):
        for prompt in PROMPTS:
            body = {
                "text": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            }
            answer = asked.ask("/generate", body)
            assert answer.status == 200, answer.body
            found.append(answer.body["text"])
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with plain_server(tmp_path_factory.mktemp("plain")) as asked:
        return texts(asked)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], str]:
    """Texts, state and log of a server in which speculation loses at first and wins later."""
    times = f"{PLAIN_MS},{LOSING_MS},{WINNING_MS},{CHANGE}"
    with server(tmp_path_factory.mktemp("live"), times) as asked:
        found = texts(asked)
        return found, asked.get("/server_info")["internal_states"][0], asked.log.read_text(errors="replace")


def test_text_stays_that_of_plain_decoding(plain: list[str], lived: Any) -> None:
    assert lived[0] == plain


def test_it_leaves_and_comes_back_and_says_so(lived: Any) -> None:
    _, state, log = lived
    lines = [line for line in log.splitlines() if "Switched to" in line]
    assert "Switched to plain decode" in lines[0] and "cycle 9.00 ms" in lines[0], lines
    assert "Switched to speculation" in lines[1] and "decode 2.00 ms" in lines[1], lines
    counters = state["spec_stats"]["counters"]
    assert counters['spec_auto_switches{to="plain"}'] >= 1
    assert counters['spec_auto_switches{to="speculate"}'] >= 1
    assert counters['spec_auto_steps{mode="plain"}'] > 50
    assert state["speculative_auto"]["mode"] == "speculate"
    # Rows that the draft was owed were written when speculation came back.
    assert counters["spec_auto_caught_up_rows"] > 10
    assert state["spec_stats"]["kept_length"] > 1.5


def test_control_where_speculation_always_wins_it_never_leaves(
    plain: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    times = f"{PLAIN_MS},{WINNING_MS},{WINNING_MS},0"
    with server(tmp_path_factory.mktemp("control"), times) as asked:
        assert texts(asked) == plain
        state = asked.get("/server_info")["internal_states"][0]
    assert state["speculative_auto"]["mode"] == "speculate"
    assert not any(name.startswith("spec_auto_switches") for name in state["spec_stats"]["counters"])
