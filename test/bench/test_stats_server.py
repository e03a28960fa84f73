"""The statistics on real servers: the shipped model on the CPU, a draft that fits nothing, and the topic off."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.bench_verify import measure
from sglang.bench_verify.environment import Environment
from sglang.bench_verify.launch import RunningServer, ServerPlan, plans
from sglang.bench_verify.prompts import Prompt, read
from sglang.srt.speculative.stats.accept import histogram_faults

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
# An idle scheduler polls and takes a core from the test beside it; with the last flag it waits.
FLAGS = (
    *("--device", "cpu", "--max-total-tokens", "4096", "--enable-metrics", "--decode-log-interval", "10"),
    "--sleep-on-idle",
)
STARTUP_S = 600.0


def start(plan: ServerPlan, folder: Path) -> RunningServer:
    """A server of this plan, with its log in ``folder``."""
    return RunningServer(plan, folder / "server.log", folder / "baseline.json", STARTUP_S)


def speculating(**changes: Any) -> ServerPlan:
    """The shipped pair with a chain of 3."""
    arguments = {"model": str(MODELS / "nano"), "draft": str(MODELS / "nano-eagle3")} | changes
    return plans(**arguments, steps=2, names=["fork"], stock=(), extra=FLAGS)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared server logs, and where a plain one has left its baseline."""
    folder = tmp_path_factory.mktemp("fork")
    base = plans(str(MODELS / "nano"), str(MODELS / "nano-eagle3"), 2, ["baseline"], (), FLAGS)[0]
    with start(base, folder) as running:
        running.client.generate("Once upon a time", 60, ignore_eos=True)
        assert running.client.statistics()["decode_ms"]["decode"] > 0
    assert (folder / "baseline.json").exists()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """One server, started with a baseline, for the tests of this module that do not need another."""
    with start(speculating(), folder) as running:
        yield running


STORY = Prompt("story", "story", (("user", "Tell me a story about a wolf and a silver key."),))
FACT = Prompt("fact", "fact", (("user", "Name the capital of Nepal."),))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 24, 64])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_identities_of_the_histogram(server: RunningServer, tokens: int, ignore_eos: bool) -> None:
    """vllm#56101 and sglang#33518: what lies behind the end is not accepted, and the counts add up."""
    info = server.client.generate("Name the capital of Nepal.", tokens, ignore_eos=ignore_eos).info
    verifies = info.get("spec_verify_ct", 0)
    histogram = info.get("spec_correct_drafts_histogram", [])
    faults = histogram_faults(
        histogram, verifies, info.get("spec_num_correct_drafts", 0), info["completion_tokens"]
    )
    assert faults == []
    if verifies:
        assert 1 <= info["spec_kept_length"] <= 3 and len(info["spec_kept_by_position"]) == 2
        assert info["spec_cycle"]["clock"] == "host"


def shares(server: RunningServer) -> tuple[float, float]:
    """What the phases of one request sum to, as a share of its wall time and of its decode time."""
    before = server.client.statistics()
    answer = server.client.generate("Once upon a time there was a hedgehog", 120, ignore_eos=True)
    after = server.client.statistics()
    spent = sum(
        ms - before["phase_totals"].get(name, [0, 0])[0] for name, (ms, _) in after["phase_totals"].items()
    )
    decode = 1e3 * (
        answer.info["e2e_latency"]
        - (answer.info["prefill_finished_time"] - answer.info["forward_entry_time"])
    )
    return spent / (1e3 * answer.seconds), spent / decode


def test_phases_are_the_wall_time_of_the_request(server: RunningServer) -> None:
    found = []
    while not found or (len(found) < 24 and abs(found[-1][1] - 1.0) > 0.1):
        # The processes of a busy machine lose the core between two phases, too: the next request may not.
        found.append(shares(server))
        # The request's wall time also holds its prefill and the way through HTTP, never less than its cycles.
        assert found[-1][0] <= 1.02
    assert found[-1][0] > 0.6, found
    assert found[-1][1] == pytest.approx(1.0, abs=0.1), found


def test_events_of_a_stream_are_not_its_tokens(server: RunningServer) -> None:
    """sglang#22063: an event carries several tokens; the usage figure is right."""
    body = {
        "text": "Once upon a time",
        "stream": True,
        "sampling_params": {"max_new_tokens": 60, "temperature": 0},
    }
    request = urllib.request.Request(
        f"{server.client.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])["meta_info"]
    assert last["completion_tokens"] > len(events)
    assert len(events) >= last["spec_verify_ct"]


def test_a_chat_answer_shows_its_acceptance(server: RunningServer) -> None:
    answer = server.client.chat(STORY, 48)
    assert answer.info["spec_kept_length"] > 1.5
    assert sum(answer.info["spec_correct_drafts_histogram"]) == answer.info["spec_verify_ct"]
    assert "weight_version" in answer.info


def test_rows_record_and_shipped_prompts(server: RunningServer) -> None:
    record = Environment()
    width = measure.describe(server.client, record)
    assert width == 3 and record.topics["verify-stats"] == "applied"
    assert record.ranks[0].pid > 0 and "CUDA_DEVICE_MAX_CONNECTIONS" in record.ranks[0].variables
    rows = measure.run(
        server.client, measure.Server("fork", "cpu"), read(MODELS / "prompts.jsonl")[:3], 40, width
    )
    for row in rows:
        assert "completion tokens, but" not in row.note
        assert set(row.phases_ms) >= {"draft", "verify", "sample", "draft_extend"}


def test_metrics_and_log_line(server: RunningServer, folder: Path) -> None:
    server.client.generate("The sea was", 80, ignore_eos=True)
    with urllib.request.urlopen(f"{server.client.url}/metrics", timeout=300) as response:
        text = response.read().decode()
    for name in (
        "spec_phase_ms",
        "spec_phase_seconds_total",
        "spec_cycle_ms",
        "spec_kept_length",
        "spec_cycles_total",
    ):
        assert f"sglang:{name}" in text, name
    log = (folder / "server.log").read_text()
    assert "Speculation: cycle" in log
    assert "NCCL environment as read back in 1 rank(s)" in log


def test_a_draft_that_fits_nothing_raises_the_alarm(tmp_path: Path) -> None:
    """sglang#25673: an acceptance near zero must be said, with the flag to look at."""
    sys.path.append(str(ROOT / "test" / "engine"))
    tiny_models: Any = __import__("tiny_models")
    pair = tiny_models.write_llama_pair(tmp_path)
    plan = speculating(model=str(pair.target), draft=str(pair.draft))
    with start(plan, tmp_path) as running:
        running.client.generate("Hello", 120, ignore_eos=True)
        statistics = running.client.statistics()
    assert statistics["alarm"] == "draft accepts almost nothing" and statistics["alarms"] == 1
    log = (tmp_path / "server.log").read_text()
    assert log.count("draft accepts almost nothing") == 1 and "--speculative-draft-model-path" in log
    # This server knows no plain decode.
    assert "Speculation: cycle" in log and "wins where a plain decode takes more than" in log


def test_with_the_topic_off_none_of_it_is_there(tmp_path: Path) -> None:
    """The control: what these tests look at comes from the topic."""
    plan = ServerPlan("off", "upstream", 2, ("verify-stats",), speculating().arguments)
    with start(plan, tmp_path) as running:
        info = running.client.generate("Name the capital of Nepal.", 24).info
        assert running.client.statistics() == {}
    assert "spec_cycle" not in info and "spec_kept_length" not in info
    assert "Speculation:" not in (tmp_path / "server.log").read_text()


def test_the_baseline_of_a_plain_server_reaches_the_speculating_one(
    server: RunningServer, folder: Path
) -> None:
    server.client.generate("Once upon a time", 60, ignore_eos=True)
    log = (folder / "server.log").read_text()
    assert "Speculation: cycle" in log and "accepted, gets" in log
