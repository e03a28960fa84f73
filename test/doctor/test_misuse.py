"""The doctor asked in a way that it cannot answer: one line with the value and the remedy, status 2, at once."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from sglang.verify_doctor import server
from sglang.verify_doctor.__main__ import main
from sglang.verify_doctor.facts import children, document

FACTS = Path(__file__).parent / "facts"


def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device without an end, a directory, a name that nobody may have; and a pipe, which is as good as a file."""
    for place in ("/dev/zero", str(tmp_path), "x" * 5000, "", "/dev/null", str(tmp_path / "none")):
        assert main(["--from", place]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = b"\xef\xbb\xbf" + (FACTS / "h200_x2_nvlink.json").read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True)
    writer.start()
    assert main(["--from", str(pipe)]) == 0
    writer.join(10)


@pytest.mark.parametrize("place", ["/proc/nowhere/x", "/proc/version", "", "/"])
def test_facts_that_cannot_be_kept(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told at once: a look at the machine takes its time, and its report would be lost."""
    monkeypatch.setattr(document, "gather", lambda **_: pytest.fail("the machine was looked at"))
    assert main(["--save-facts", place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--save-facts {place}".strip() in line and "cannot be written" in line


def test_a_question_about_the_place_leaves_it_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    document.check_place(file)
    assert not file.exists()
    file.write_text("kept", encoding="utf-8")
    document.check_place(file)
    assert file.read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize(
    "argv",
    [
        ["--from", "f", "--save-facts", "g"],
        ["--from", "f", "--load"],
        ["--server", "a", "--from", "f"],
        ["--server", "a", "--load"],
        ["--server", "a", "--config", "c"],
    ],
)
def test_options_that_would_have_no_effect(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2 and "one" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "file:///etc/passwd",
        "ftp://127.0.0.1",
        "127.0.0.1:http",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "http://[::1",
        "a b",
        "http://127.0.0.1:1/\n x",
        "\u00b5.invalid:1",
        "x" * 300,
    ],
)
def test_addresses_of_no_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verify_doctor: error: ")


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["ssh", "hung up", "cut short", "no text", "too deep", "404", "elsewhere", "bad chunk"],
)
def test_answers_of_no_server(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert main(["--server", f"127.0.0.1:{listening.getsockname()[1]}"]) == 2
        thread.join(10)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verify_doctor: error: 127.0.0.1:")


def test_an_answer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read brings something, so that no limit on a read ends it."""

    class Trickle:
        def read1(self, _: int) -> bytes:
            return b" "

    monkeypatch.setattr(server, "LIMIT_S", 0.05)
    with pytest.raises(OSError, match="no end within"):
        server._bounded(Trickle())
    monkeypatch.setattr(server, "LIMIT_S", 60.0)
    monkeypatch.setattr(server, "MOST_BYTES", 100)
    with pytest.raises(OSError, match="longer than"):
        server._bounded(Trickle())


def test_facts_hold_no_paths() -> None:
    """A package that does not load names its folders; they are of one machine."""
    error = "ImportError: /home/me/.venv/lib/torch/libtorch.so: undefined symbol (['/opt/x y/a.so', '/srv/b/c.*'])"
    text = children._without_places({"error": error})["error"]
    assert text == "ImportError: libtorch.so: undefined symbol (['x y/a.so', 'c.*'])"
    assert children._without_places({"error": "no answer within 3 s"}) == {"error": "no answer within 3 s"}
    assert children._without_places({"version": "/not/an/error"}) == {"version": "/not/an/error"}
