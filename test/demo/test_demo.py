"""The demo as a process: exit status, output, results file; and that it never leaves a server behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The fork's package is entered without upstream's own import, which takes many seconds and plays no part here.
RUNNER = """
import sys, types
sys.modules["sglang"] = types.ModuleType("sglang")
sys.modules["sglang"].__path__ = [{package!r}]
from sglang.verify_demo import cli, process
process.STOP_GRACE = 1.0
def command(args, port, *, speculative):
    return [sys.executable, {fake!r}, str(port), {mode!r}, "EAGLE3" if speculative else "plain"]
if {mode!r} != "real":
    cli.server_command = command
sys.exit(cli.main(sys.argv[1:]))
"""


class Demo:
    """A demo in its own session, with everything that it started findable by a mark in the environment."""

    def __init__(self, folder: Path, mode: str, *extra: str) -> None:
        prompts = folder / "prompts.jsonl"
        rows = [
            {"id": "a", "kind": "chat", "messages": [{"role": "user", "content": "say [one]"}]},
            {"id": "b", "kind": "text", "prompt": "one"},
            {"id": "c", "kind": "chat", "messages": [{"role": "user", "content": "again"}]},
        ]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.mark = f"DEMO_TEST_MARK={folder}"
        self.out, self.logs = folder / "out.json", folder / "logs"
        code = RUNNER.format(
            package=str(ROOT / "python/sglang"),
            fake=str(Path(__file__).with_name("demo_server.py")),
            mode=mode,
        )
        models = (str(ROOT / "models/nano"), str(ROOT / "models/nano-eagle3"))
        arguments = [
            "--model-path",
            models[0],
            "--draft-path",
            models[1],
            "--prompts",
            str(prompts),
            "--show",
            "2",
        ]
        arguments += ["--out", str(self.out), "--logs", str(self.logs), "--count", "3", *extra]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={
                **os.environ,
                "DEMO_TEST_MARK": str(folder),
                "COLUMNS": "120",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout: float = 240.0) -> tuple[int, str]:
        """Exit status and output."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, output

    def left_over(self) -> list[int]:
        """Processes that carry the mark, the demo's own included while it lives."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if alive and self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def wait_for_log(self, text: str, timeout: float = 120.0) -> None:
        """Until the server's log holds `text`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if any(text in log.read_text() for log in self.logs.glob("*.log")):
                return
            time.sleep(0.05)
        raise AssertionError(f"no {text!r} in the log after {timeout} s")


def test_equal_answers(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "good")
    status, output = demo.finish()
    assert status == 0, output
    assert "> say [one]" in output and "one two" in output and "equal" in output
    assert "no performance claim" in " ".join(output.split())
    assert demo.left_over() == []
    row, plain = json.loads(demo.out.read_text())["rows"]
    assert (row["case"]["draft_tokens"], plain["case"]["draft_tokens"]) == (3, 0)
    assert "accept_length" not in plain["metrics"] and plain["metrics"]["decode_ms"]["value"] >= 0
    assert row["metrics"]["accept_length"]["value"] == 2.0
    assert row["phases_ms"] == {"draft": 2.0, "verify": 5.0, "wall": 9.0}
    assert row["counters"]["differing"] == 0 and row["counters"]["kept_3"] == 3
    assert row["case"]["model"] == "nano"


def test_a_difference_is_found_and_named(tmp_path: Path) -> None:
    status, output = Demo(tmp_path, "wrong").finish()
    assert status == 1 and "3 of 3 prompts differ" in output
    assert "a: token 3 is 99 with speculation and 14 without" in output


def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "dies")
    status, output = demo.finish()
    assert status == 2 and "status 3" in output and "the model is missing" in output
    assert demo.left_over() == []


def test_a_server_that_never_gets_healthy_is_given_up(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "hangs", "--timeout", "2")
    status, output = demo.finish()
    assert status == 2 and "was not healthy after 2 s" in output and "--timeout" in output
    assert demo.left_over() == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["hangs"])
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, sign: signal.Signals, mode: str) -> None:
    demo = Demo(tmp_path, mode)
    demo.wait_for_log("fake server")
    assert len(demo.left_over()) == 3, "the demo, its server and the server's child"
    demo.process.send_signal(sign)
    status, output = demo.finish()
    assert status == 130 and "interrupted" in output
    assert demo.left_over() == []


@pytest.mark.server
def test_the_real_server_is_stopped_on_ctrl_c(tmp_path: Path) -> None:
    """With the real command, once the server has processes of its own."""
    demo = Demo(tmp_path, "real", "--timeout", "600")
    demo.wait_for_log("Init torch distributed", timeout=600)
    assert len(demo.left_over()) >= 3, "the demo, the server and its scheduler"
    demo.process.send_signal(signal.SIGINT)
    status, output = demo.finish()
    assert status == 130, output
    assert demo.left_over() == []
