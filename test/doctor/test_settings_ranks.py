"""vllm#19105: a real server with two ranks on the CPU, and what each of them finds of what the user set."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.bench_verify.launch import RunningServer, ServerPlan
from sglang.srt.verify_settings import profiles
from sglang.verify_doctor import server

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
STARTUP_S = 900.0
# A level, upstream's own forced value turned round, and a slip.
SET = {"NCCL_P2P_LEVEL": "SYS", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_PROTOO": "LL"}
PLAN = ServerPlan(
    "two ranks",
    "fork",
    arguments=(
        *("--model-path", str(ROOT / "models" / "nano"), "--device", "cpu", "--max-total-tokens", "2048"),
        *("--dp-size", "2", "--nccl-profile", "field-report", "--sleep-on-idle"),
    ),
    environment=SET,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """The server and its log. Two replicas of one rank each: upstream cannot split a model over ranks on a CPU
    without AMX, and the way from the launcher to a rank is the same."""
    log = tmp_path_factory.mktemp("ranks") / "server.log"
    with RunningServer(PLAN, log, log.with_name("baseline.json"), STARTUP_S) as started:
        yield started, log


def test_every_rank_finds_what_was_set(running: tuple[RunningServer, Path]) -> None:
    states = server.fetch(running[0].client.url)["states"]
    records = [rank for state in states for rank in state["ranks"]]
    assert len({record["pid"] for record in records}) == 2
    for record in records:
        assert record["differs"] == []
        assert SET.items() <= record["variables"].items()
        # What the user set is not the profile's to change; the rest of it arrived.
        recommended = {
            n: v.value for n, v in profiles.PROFILES["field-report"].values.items() if n not in SET
        }
        assert recommended.items() <= record["variables"].items()


def test_the_start_says_where_each_value_comes_from(running: tuple[RunningServer, Path]) -> None:
    text = running[1].read_text(encoding="utf-8", errors="replace")
    assert "NCCL_P2P_LEVEL=SYS (you)" in text and "CUDA_DEVICE_MAX_CONNECTIONS=1 (you)" in text
    assert "NCCL_NTHREADS=512 (profile field-report)" in text and "(upstream's default)" in text
    assert "NCCL_PROTOO is set" in text and "did you mean NCCL_PROTO?" in text


def test_the_doctor_shows_the_ranks(running: tuple[RunningServer, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang.verify_doctor", "--server", running[0].client.url],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "server, replica 1" in done.stdout and "1 rank(s) see:" in done.stdout
    assert "NCCL_P2P_LEVEL=SYS" in done.stdout
