"""A real server with two ranks on a CPU whose layers reduce through our communicator over simulated peers.

In float32 its EAGLE-3 texts are those that transformers computes in one process: target and draft, plain and fused
reductions, and the residuals that EAGLE-3 keeps, all take part. Then one rank is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import continuation
from sglang.bench_verify.launch import RunningServer, ServerPlan
from sglang.verify_demo.process import session_members
from sglang.verify_doctor import server

# Two ranks, tokenizer and detokenizer: minutes to start on two busy cores.
pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
MODEL, DRAFT = ROOT / "models" / "nano", ROOT / "models" / "nano-eagle3"
TOKENS, STARTUP_S, GONE_S = 32, 600.0, 30.0
PLAN = ServerPlan(
    "two ranks",
    "fork",
    steps=2,
    arguments=(
        *("--model-path", str(MODEL), "--device", "cpu", "--tp", "2", "--dtype", "float32"),
        *("--max-total-tokens", "4096", "--disable-radix-cache"),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT)),
        *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "3"),
    ),
    environment={"SGLANG_FORK_ALL_REDUCE": "simulate"},
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """The server and its log."""
    log = tmp_path_factory.mktemp("two-ranks") / "server.log"
    with RunningServer(PLAN, log, log.with_name("baseline.json"), STARTUP_S) as started:
        yield started, log


def prompts() -> list[list[int]]:
    """Token ids of the first shipped questions."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    lines = (ROOT / "models" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [entry["messages"] for line in lines if "messages" in (entry := json.loads(line))]
    return [tokenizer.encode(talk[0]["content"]).ids for talk in talks[:6]]


def expected(prompt: list[int]) -> list[int]:
    """The greedy continuation by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return continuation(model, prompt, TOKENS)


def generate(url: str, ids: list[list[int]]) -> list[dict[str, Any]]:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


def reductions(url: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The state of the tensor-parallel group, and its launches by kind and method."""
    states = server.fetch(url)["states"]
    state: dict[str, Any] = states[0]["one_shot_all_reduce"]["tp:0"]
    launches = dict(state["lines"])["launches"]
    return state, {kind: int(n) for kind, n in re.findall(r"(plain|fused) one-shot (\d+)", launches)}


def test_texts_are_those_of_one_process(running: tuple[RunningServer, Path]) -> None:
    ids = prompts()
    assert len(ids) == 6
    _, before = reductions(running[0].client.url)
    answers = generate(running[0].client.url, ids)
    state, after = reductions(running[0].client.url)
    for prompt, answer in zip(ids, answers, strict=True):
        assert answer["output_ids"][:TOKENS] == expected(prompt)
    # A draft whose reductions were wrong would still give these texts, and be refused at every step.
    kept = sum(len(answer["output_ids"]) for answer in answers)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert kept / steps > 1.5
    lines = dict(state["lines"])
    assert state["ours"] and lines["kernels"] == "simulated on the CPU" and "passed in" in lines["preflight"]
    assert after["fused"] > before["fused"] and after["plain"] > before["plain"]


def test_a_killed_rank_takes_the_server_down_with_its_name(running: tuple[RunningServer, Path]) -> None:
    """The last test of this file: after it there is no server."""
    log = running[1]
    text = log.read_text(encoding="utf-8", errors="replace")
    states = server.fetch(running[0].client.url)["states"]
    victim = next(rank["pid"] for rank in states[0]["ranks"] if rank["rank"] == 1)
    session = running[0]._server.pid
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    while session_members(session) and time.monotonic() - started < GONE_S:
        time.sleep(0.2)
    left = session_members(session)
    text = log.read_text(encoding="utf-8", errors="replace")
    assert not left, f"{len(left)} processes after {GONE_S} s\n{text[-3000:]}"
    assert re.search(
        rf"rank 1 \(process {victim}\) died during start or serving without a word; rank 0 ends", text
    ), text[-3000:]
