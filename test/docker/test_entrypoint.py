"""``docker/entrypoint`` with a Python that plays doctor and server: order, refusals, signals, exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[2] / "docker" / "entrypoint"
LIMIT_S = 120

# Writes what it is called with, then plays its part.
PLAYER = """#!/usr/bin/env bash
echo "$*" >> "$PLAYED"
plays() { echo > "$PLAYED.part"; }
case "$2" in
  sglang.verify_doctor) echo "doctor speaks"; exit "${DOCTOR_STATUS:-0}" ;;
  sglang.launch_server)
    echo $$ >> "$PLAYED.pids"
    case "${SERVER:-exits}" in
      exits) exit "${SERVER_STATUS:-0}" ;;
      serves) trap 'echo stopped >> "$PLAYED"; exit 0' TERM; sleep 1000 & echo $! >> "$PLAYED.pids"; plays; wait ;;
      loading) sleep 1000 & echo $! >> "$PLAYED.pids"; plays; wait ;;
      drains) trap 'kill -KILL $$' TERM; plays; while :; do sleep 0.1; done ;;
      stuck) trap '' TERM; plays; while :; do sleep 1; done ;;
    esac ;;
esac
"""


@dataclass
class Stage:
    """A folder with the player, and the environment of a container."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        player = self.folder / "python"
        player.write_text(PLAYER, encoding="utf-8")
        player.chmod(0o755)
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(player),
            "PLAYED": str(self.folder / "played"),
            "HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    @property
    def played(self) -> list[str]:
        """What was called, in order."""
        path = self.folder / "played"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """The entrypoint, running."""
        return subprocess.Popen(
            [str(ENTRYPOINT), *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Exit status and output."""
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output

    def wait_for_server(self) -> None:
        """Until the server plays its part and has set its traps, within a bound."""
        end = time.monotonic() + LIMIT_S
        while not (self.folder / "played.part").exists():
            assert time.monotonic() < end, self.played
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Processes of the server that still run; one that was just killed gets the time to die."""
        path = self.folder / "played.pids"
        pids = [int(line) for line in path.read_text().split()] if path.exists() else []
        end = time.monotonic() + LIMIT_S
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        return [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for pid in made.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_doctor_then_server_with_the_port_of_the_health_check(stage: Stage) -> None:
    status, output = stage.run("--config", "r.yaml", "--port", "1", PORT="30123", FAST_VERIFY_SERVING="gpu")
    assert status == 0, output
    assert stage.played == [
        "-m sglang.verify_doctor --serving gpu --config r.yaml --port 1",
        "-m sglang.launch_server --config r.yaml --port 1 --host 0.0.0.0 --port 30123",
    ]


def test_a_fault_refuses_the_start(stage: Stage) -> None:
    status, output = stage.run("--config", "r.yaml", DOCTOR_STATUS="1")
    assert status == 1 and "doctor speaks" in output and "FAST_VERIFY_DOCTOR=warn" in output
    assert len(stage.played) == 1


def test_told_otherwise(stage: Stage) -> None:
    status, output = stage.run("--x", DOCTOR_STATUS="1", FAST_VERIFY_DOCTOR="warn")
    assert status == 0 and "although the doctor found a fault" in output
    assert len(stage.played) == 2


def test_doctor_off(stage: Stage) -> None:
    assert stage.run("--x", FAST_VERIFY_DOCTOR="off")[0] == 0
    assert [line.split()[1] for line in stage.played] == ["sglang.launch_server"]


def test_misspelt_mode(stage: Stage) -> None:
    status, output = stage.run("--x", FAST_VERIFY_DOCTOR="of")
    assert status == 2 and "give refuse, warn or off" in output and not stage.played


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("FAST_VERIFY_STOP_GRACE_S", "soon", "give whole seconds"),
        ("FAST_VERIFY_STOP_GRACE_S", "-1", "give whole seconds"),
        ("PORT", "http", "give a port"),
        ("FAST_VERIFY_STOP_GRACE_S", "a[$(touch played)]", "give whole seconds"),
        ("FAST_VERIFY_SERVING", "tpu", "give gpu or cpu"),
    ],
)
def test_misspelt_settings(stage: Stage, variable: str, value: str, says: str) -> None:
    """Told before anything starts: the grace is read when the server stops, and would then leave it running."""
    status, output = stage.run("--x", **{variable: value})
    assert status == 2 and f"{variable}={value}" in output and says in output and not stage.played


@pytest.mark.parametrize("status", (2, 127, 139))
def test_a_doctor_that_cannot_judge(stage: Stage, status: int) -> None:
    """It was misused, is not there, or died: no fault of the machine, and no start either."""
    code, output = stage.run("--x", DOCTOR_STATUS=str(status))
    assert code == 1 and f"could not judge this (status {status})" in output and len(stage.played) == 1
    assert stage.run("--x", DOCTOR_STATUS=str(status), FAST_VERIFY_DOCTOR="warn")[0] == 0


def test_arguments_arrive_as_they_are(stage: Stage) -> None:
    """Blanks, stars, quotes, nothing at all, and what looks like the shell's own."""
    odd = ("--x", "a b", "*", "", "$HOME", "'\"", "-n", "\u00b5", "--", "doctor")
    assert stage.run(*odd, FAST_VERIFY_DOCTOR="off")[0] == 0
    (line,) = stage.played
    assert line == f"-m sglang.launch_server {' '.join(odd)} --host 0.0.0.0 --port 30000"


@pytest.mark.parametrize("word", ("-h", "--help"))
def test_help_is_the_servers(stage: Stage, word: str) -> None:
    assert stage.run(word)[0] == 0
    assert stage.played == [f"-m sglang.launch_server {word}"]


def test_an_option_without_its_dashes(stage: Stage) -> None:
    status, output = stage.run("config", "r.yaml")
    assert status == 127 and "options of the server begin with --" in output and not stage.played


def test_no_arguments_lists_the_recipes(stage: Stage) -> None:
    status, output = stage.run(FAST_VERIFY_SHARE=str(ENTRYPOINT.parents[1]))
    assert status == 2 and "kimi-k2.5-mla.8x-rtx-pro-6000.yaml" in output and not stage.played


def test_other_commands(stage: Stage) -> None:
    assert stage.run("echo", "hello") == (0, "hello\n")
    assert stage.run("doctor", "--json")[0] == 0
    assert stage.played == ["-m sglang.verify_doctor --json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system that refuses, which root has in /proc")
def test_a_cache_that_cannot_be_written(stage: Stage) -> None:
    status, output = stage.run("--x", TRITON_CACHE_DIR="/proc/nowhere")
    assert status == 1 and "TRITON_CACHE_DIR=/proc/nowhere cannot be written" in output and not stage.played
    # A read-only mount of models is no fault.
    assert stage.run("--x", HF_HOME="/proc/nowhere", HF_HUB_OFFLINE="1")[0] == 0


@pytest.mark.parametrize("status", (0, 1, 2, 137))
def test_the_servers_status_is_the_containers(stage: Stage, status: int) -> None:
    assert stage.run("--x", SERVER_STATUS=str(status))[0] == status


@pytest.mark.parametrize("sent", (signal.SIGTERM, signal.SIGINT), ids=lambda sent: sent.name)
@pytest.mark.parametrize(("server", "expected"), (("serves", 0), ("loading", 143), ("drains", 0)))
def test_a_signal_stops_the_server(stage: Stage, sent: signal.Signals, server: str, expected: int) -> None:
    """Sent to the entrypoint alone, as an engine does; while it serves, and while it still loads."""
    process = stage.start("--x", SERVER=server)
    stage.wait_for_server()
    process.send_signal(sent)
    assert process.wait(LIMIT_S) == expected
    assert ("stopped" in stage.played) == (server == "serves")
    assert stage.left() == []


def test_a_server_that_does_not_stop_is_killed(stage: Stage) -> None:
    process = stage.start("--x", SERVER="stuck", FAST_VERIFY_STOP_GRACE_S="2")
    stage.wait_for_server()
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 137
    assert time.monotonic() - begin >= 2
    assert stage.left() == []


#: Instead of the shell's own `wait`: a signal comes after the last look at it and before the wait begins.
SIGNALLED_WAIT = """() {
  if [ -z "${once:-}" ]; then
    once=1
    until [ -e "$PLAYED.part" ]; do sleep 0.05; done
    kill -TERM $$
  fi
  builtin wait "$@"
}"""


def test_a_signal_just_before_the_wait_is_not_lost(stage: Stage) -> None:
    """A server that ignores it is killed in time all the same."""
    process = stage.start(
        "--x", SERVER="stuck", FAST_VERIFY_STOP_GRACE_S="2", **{"BASH_FUNC_wait%%": SIGNALLED_WAIT}
    )
    assert process.wait(LIMIT_S) == 137
    assert stage.left() == []


def test_ranks_left_by_a_dead_server_are_killed(stage: Stage) -> None:
    process = stage.start("--x", SERVER="loading")
    stage.wait_for_server()
    server = int((stage.folder / "played.pids").read_text().split()[0])
    os.kill(server, signal.SIGKILL)
    assert process.wait(LIMIT_S) == 137
    assert stage.left() == []
