"""The live controller in a real server: it leaves speculation while that loses and comes back when it wins.

Times are made up (``simulated_times``), all else is real: acceptance, batches, the draft that catches up, token ids.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import simulated_times
import torch
from greedy import continuation
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from differential.servers import TARGET, Asked, eagle_server
from plugin_entry import declare

pytestmark = pytest.mark.server

PROMPTS = (
    "Once upon a time there was a hedgehog",
    "The capital of France is",
    "One, two, three, four, five,",
)
TOKENS, ROUNDS = 120, 2
# A plain step of 2 ms; a cycle of 9 ms keeps too little whatever the draft does, one of 2.1 ms wins by its first draft.
PLAIN_MS, LOSING_MS, WINNING_MS, CHANGE = 2.0, 9.0, 2.1, 120


@contextmanager
def server(folder: Path, times: str, ranks: int) -> Iterator[Asked]:
    """An EAGLE-3 server of ``ranks`` whose switch works on a CPU and sees ``times``."""
    declare(folder / "plugin", simulated_times.ENTRY)
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_SPEC_AUTO_ON_CPU", "1")
        patch.setenv(simulated_times.VARIABLE, times)
        patch.syspath_prepend(here)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH", "")])]))
        flags = (
            *("--speculative-auto=on", f"--tp={ranks}"),
            *("--log-level=info", "--enable-metrics", "--decode-log-interval=10"),
        )
        with eagle_server(folder, *flags, overlap=True, plugins=(simulated_times.ENTRY,)) as found:
            assert simulated_times.MARK in found.log.read_text(errors="replace")
            yield found


def answered(asked: Asked) -> list[list[int]]:
    """Token ids, one request after the other, so that the batch is always one."""
    found = []
    for _ in range(ROUNDS):
        for prompt in PROMPTS:
            body = {
                "text": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            }
            answer = asked.ask("/generate", body)
            assert answer.status == 200, answer.body
            found.append(answer.body["output_ids"])
    return found


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def lived(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[int]], dict[str, Any], str]:
    """Token ids, state and log of a server in which speculation loses at first and wins later."""
    times = f"{PLAIN_MS},{LOSING_MS},{WINNING_MS},{CHANGE}"
    with server(tmp_path_factory.mktemp("live"), times, request.param) as asked:
        found = answered(asked)
        return found, asked.get("/server_info")["internal_states"][0], asked.log.read_text(errors="replace")


def test_tokens_stay_those_of_plain_decoding(lived: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    expected = [continuation(model, tokenizer.encode(prompt), TOKENS) for prompt in PROMPTS]
    assert lived[0] == expected * ROUNDS


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


def test_an_interval_without_a_verify_is_reported_as_plain_decoding_is(lived: Any) -> None:
    """Upstream's periodic report divides by the verifies of its interval; plain steps are none."""
    lines = [line for line in lived[2].splitlines() if "Decode batch" in line]
    assert any("accept len" not in line for line in lines)
    assert any("accept len: " in line for line in lines)
