"""The CPU recipe through the entrypoint, for real: health while it serves, while its scheduler hangs, and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sglang.verify_demo.process import free_port, session_members
from test_files import NAME, queries

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
START_S = 600
#: What the server takes as its limit for a token of the health check.
PROBE_S = 4


@dataclass
class Container:
    """The entrypoint as a container engine starts it, on a port of the loopback interface."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    environment: dict[str, str]

    def healthy(self) -> bool:
        """What the image's health check says."""
        done = subprocess.run(
            [sys.executable, str(DOCKER / "healthcheck.py")],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PROBE_S + 30,
            check=False,
        )
        assert done.returncode in (0, 1) and done.stdout.startswith(("healthy", "unhealthy")), done
        return done.returncode == 0

    def get(self, path: str, data: dict[str, object] | None = None) -> tuple[int, str]:
        """Status and body of a request."""
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def scheduler(self) -> int:
        """Process id of the scheduler, by the title that the server gives it."""
        for pid in self.members():
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"sglang::scheduler" in title:
                return pid
        raise AssertionError("no scheduler")

    def members(self) -> list[int]:
        """Processes of the entrypoint's session that run."""
        return session_members(self.process.pid)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = tmp_path_factory.mktemp("container")
    port = free_port()
    environment = dict(os.environ) | {
        "PYTHON": sys.executable,
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "HOME": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
        "FAST_VERIFY_SERVING": "cpu",
        # This checkout may lie in an environment with other versions than the image; the doctor has its own tests.
        "FAST_VERIFY_DOCTOR": "warn",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(PROBE_S),
        "FAST_VERIFY_STOP_GRACE_S": "240",  # it drains by itself, however busy the machine is
        # So that /health is what a report complains of: 200 whatever the scheduler does.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(DOCKER / "entrypoint"), "--config", "recipes/nano.cpu.yaml", "--log-level", "warning"],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = Container(process, port, log, environment)
    try:
        end = time.monotonic() + START_S
        while not made.healthy():
            assert process.poll() is None and time.monotonic() < end, log.read_text(errors="replace")[-3000:]
            time.sleep(2)
        yield made
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(300)


GENERATE = {
    "text": "The lighthouse keeper",
    "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True},
}


def test_the_recipe_speculates(container: Container) -> None:
    status, body = container.get("/generate", GENERATE)
    answer = json.loads(body)
    assert status == 200, body
    assert answer["meta_info"]["spec_verify_ct"] > 0
    assert answer["meta_info"]["completion_tokens"] == 48


def test_metrics_of_the_dashboard_are_served(container: Container) -> None:
    """All but those that need a baseline, a topic switched off, a GPU's graphs, or a percentile of nothing."""
    # Of several lengths, so that some run passes its request's end.
    for length in (48, 47, 46, 45, 44, 43):
        short = GENERATE | {"sampling_params": dict(GENERATE["sampling_params"]) | {"max_new_tokens": length}}  # type: ignore[call-overload]
        container.get("/generate", short)
    rare = {
        "sglang:spec_decode_ms",
        "sglang:spec_break_even_length",
        "sglang:spec_speedup_ratio",
        "sglang:spec_tokens_past_end_total",
        "sglang:spec_graph_replays_total",
        "sglang:spec_eager_passes_total",
        "sglang:spec_verify_graph_steps_total",
        "sglang:spec_auto_steps_total",
        "sglang:spec_auto_switches_total",
        "sglang:inter_token_latency_seconds_bucket",
    }
    wanted = set(NAME.findall(" ".join(queries().values()))) - rare
    end = time.monotonic() + 180
    while True:
        served = set(NAME.findall(container.get("/metrics")[1]))
        if wanted <= served or time.monotonic() > end:
            break
        time.sleep(1)
        container.get("/generate", GENERATE)
    assert wanted - served == set()


def test_sglang_35822(container: Container) -> None:
    """A1: a scheduler that hangs makes the health check fail although HTTP and /health still answer."""
    scheduler = container.scheduler()
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert not container.healthy()
        assert container.get("/health")[0] == 200
    finally:
        os.kill(scheduler, signal.SIGCONT)
    end = time.monotonic() + START_S
    while not container.healthy():  # a token within the probe's limit may take a busy machine several tries
        assert time.monotonic() < end, container.log.read_text(errors="replace")[-3000:]
    assert container.get("/generate", GENERATE)[0] == 200


def test_sigterm_ends_everything(container: Container) -> None:
    """The last test of the file: it stops the server."""
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(300) == 0, container.log.read_text(errors="replace")[-2000:]
    end = time.monotonic() + 120
    while container.members() and time.monotonic() < end:
        time.sleep(0.2)
    assert container.members() == []
    assert not container.healthy()
