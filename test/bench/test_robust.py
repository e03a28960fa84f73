"""What a user can do wrong, and what can happen to a run: one line, a status, and the rows measured until then."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import Handler, serving
from leaf import environment
from sglang.bench_verify.__main__ import main, with_command
from sglang.bench_verify.client import Client, ServerError
from sglang.bench_verify.commands.launch import draft_steps, topics_named
from sglang.bench_verify.commands.slice import last_line
from sglang.bench_verify.launch import LaunchError
from sglang.bench_verify.rows import Results
from sglang.bench_verify.show import print_table

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-S", "-m", "sglang.bench_verify")
PROMPTS = str(ROOT / "models/prompts.jsonl")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ([], ["demo"]),
        (["--out", "x.json"], ["demo", "--out", "x.json"]),
        (["--once"], ["demo", "--once"]),
        (["diff", "a", "b"], ["diff", "a", "b"]),
        (["--help"], ["--help"]),
        (["-h"], ["-h"]),
    ],
)
def test_without_a_command_the_demo_runs(words: list[str], meant: list[str]) -> None:
    assert with_command(words) == meant


def test_an_engine_that_ended_is_told_in_a_line() -> None:
    assert last_line("engine fork ended\nwarning\n  File x\nArgumentFault: draft names no layers\n\n") == (
        "ArgumentFault: draft names no layers"
    )
    assert last_line("") == "no reason was given"


def foreign(tmp_path: Path) -> str:
    path = tmp_path / "foreign.json"
    path.write_text('{"a": 1}')
    return str(path)


WRONG: list[tuple[list[str], str]] = [
    (["diff", "no.json", "no.json"], "no.json: not a results file"),
    (["diff", "FOREIGN", "FOREIGN"], "schema is None"),
    (["plots", "no.json"], "no.json"),
    (["server", "127.0.0.1:9", "--prompts", "no.jsonl"], "no.jsonl"),
    (["server", "127.0.0.1:9", "--kinds", "poems"], "poems"),
    (["server", "127.0.0.1:9", "--out", "/dev/null/x.json"], "--out /dev/null/x.json cannot be written"),
    (["server", "127.0.0.1:9", "--out", "."], "is a folder"),
    (["launch", "--model", "./no", "--draft", "./no"], "no model at ./no"),
    (["launch", "--model", "m", "--draft", "d", "--servers", "forc"], "unknown server 'forc'"),
    (["launch", "--model", "m", "--draft", "d", "--servers", ","], "names no server"),
    (["launch", "--model", "m", "--draft", "d", "--server-args", "a 'b"], "--server-args"),
    (["demo", "--models", "nowhere"], "run from the repository's root"),
    (["slice", "--model", "kimi-k9"], "kimi-k9"),
    (["slice", "--layers", "2"], "distinct from 7 layers on"),
    (["slice", "--variants", "stock"], "--variants 'stock'"),
    (["slice", "--steps", "0,9"], "--steps 9 is above 4"),
    (["slice", "--most-tokens", "5"], "--most-tokens leaves no case"),
    (["tables", "no.md"], "no.md"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words)[:40] for words, _ in WRONG])
def test_a_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([foreign(tmp_path) if word == "FOREIGN" else word for word in words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["server"],
        ["server", "x", "--count", "0"],
        ["server", "x", "--tokens", "-3"],
        ["launch", "--model", "m", "--draft", "d", "--steps", "0"],
        ["launch", "--model", "m", "--draft", "d", "--steps", "a,b"],
        ["demo", "--count", "many"],
        ["slice", "--contexts", "1x"],
        ["slice", "--rounds", "0"],
        ["frobnicate"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_refused_with_its_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage:" in (text := capsys.readouterr().err) and "Traceback" not in text


def test_an_empty_prompt_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with serving() as url:
        assert main(["server", url, "--prompts", str(empty)]) == 2
    assert "no prompts" in capsys.readouterr().err


def test_draft_steps_and_topics_are_read() -> None:
    assert draft_steps("1,2,2,4") == (1, 2, 4)
    assert topics_named("") == ()
    if "verify-stats" in topics_named("verify-stats"):
        with pytest.raises(LaunchError, match="no topic 'verify-stat'"):
            topics_named("run-end,verify-stat")


class Html(Handler):
    """A server of something else."""

    def do_GET(self) -> None:
        """A page."""
        self._raw(b"<html></html>")

    do_POST = do_GET

    def _raw(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Other(Html):
    """A server that answers JSON of another kind."""

    def do_GET(self) -> None:
        """A list of states that is none."""
        self._raw(b'{"internal_states": "none", "choices": []}')

    do_POST = do_GET


class Cut(Html):
    """A server that dies inside an answer."""

    def do_GET(self) -> None:
        """Half of what it promised."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"a"')

    do_POST = do_GET


@pytest.mark.parametrize("handler", [Html, Other, Cut])
def test_another_server_is_no_traceback(handler: Any) -> None:
    with serving(handler) as url:
        client = Client(url, timeout_s=10)
        for call in (client.statistics, lambda: client.generate("x", 4)):
            with pytest.raises(ServerError, match=r"127\.0\.0\.1"):
                call()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9", "http://127.0.0.1:9/", "ftp://127.0.0.1", "http://[broken", "nowhere.invalid"]
)
def test_an_address_that_leads_nowhere_is_no_traceback(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not Client(url).healthy()
    assert main(["server", url, "--prompts", PROMPTS]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and len(error.splitlines()) == 1


def test_an_address_without_a_scheme_is_http() -> None:
    with serving() as url:
        assert Client(url.removeprefix("http://")).healthy()


class Dying(Handler):
    """A server that is gone after the warm-up and two answers."""

    answers = 0

    def do_POST(self) -> None:
        """An answer, or a closed connection."""
        Dying.answers += 1
        if Dying.answers > 3:
            self.close_connection = True
            return
        super().do_POST()


def test_a_server_that_dies_in_the_middle_leaves_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Dying.answers = 0
    out = tmp_path / "rows.json"
    with serving(Dying) as url:
        assert main(["server", url, "--prompts", PROMPTS, "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "error: http://127.0.0.1" in captured.err and "incomplete" in captured.out
    rows = Results.load(out).rows
    assert [row.bench for row in rows] == ["server", "server", "server_summary"]
    assert rows[-1].note.startswith("incomplete: the run ended early")


class Slow(Handler):
    """A server that takes its time after the first answers."""

    over = threading.Event()

    def do_POST(self) -> None:
        """Two quick answers, then none for as long as the test runs."""
        if Handler.cycles > 20:
            Slow.over.wait(600)
            self.close_connection = True
            return
        super().do_POST()


@pytest.mark.parametrize(
    ("sign", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_an_interrupted_run_leaves_usable_rows(tmp_path: Path, sign: signal.Signals, status: int) -> None:
    """Ctrl-C and SIGTERM print and write what there is; SIGKILL leaves the file of the last answer."""
    out = tmp_path / "rows.json"
    Slow.over.clear()
    with serving(Slow) as url:
        process = subprocess.Popen(
            [
                *COMMAND,
                "server",
                url,
                "--prompts",
                PROMPTS,
                "--out",
                str(out),
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 600
        while not (out.exists() and len(Results.load(out).rows) == 2) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(sign)
        text, error = process.communicate(timeout=300)
        Slow.over.set()
    assert process.returncode == status and "Traceback" not in error
    rows = Results.load(out).rows
    if sign == signal.SIGKILL:
        assert len(rows) == 2
    else:
        assert [row.bench for row in rows] == ["server", "server", "server_summary"]
        assert "incomplete: the run ended early" in text and "interrupted after 2 rows" in error


SHOW = (
    "import sys; from sglang.bench_verify.__main__ import lenient_output; lenient_output();"
    "from sglang.bench_verify.show import print_table;"
    "print_table('runs \\u2013 caf\\u00e9', (['server', 'note'], [['eagle3', '\\u65e5\\u672c']] * 3))"
)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_locale_without_the_characters_prints_all_the_same(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", SHOW],
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C"),
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"eagle3") == 3


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path: Path) -> None:
    environment_file = tmp_path / "e"
    with environment_file.open("wb") as errors:
        process = subprocess.Popen(
            [*COMMAND, "environment"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        process.stdout.close()
        process.wait(600)
    assert (
        "Traceback" not in environment_file.read_text()
        and "Exception ignored" not in environment_file.read_text()
    )


@pytest.mark.parametrize("width", [20, 60, 400])
def test_a_narrow_terminal_loses_no_figure(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    names = [f"column{index}" for index in range(12)]
    cells = [f"{1000.125 * (index + 1):.3f}" for index in range(12)]
    print_table("t", (names, [cells]))
    text = capsys.readouterr().out
    assert all(cell in text for cell in cells)
    if width < 100:
        assert max(map(len, text.splitlines())) <= max(20, width)
