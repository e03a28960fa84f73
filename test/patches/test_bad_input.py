"""Every bad input: one clear message, exit status 1 or 2, and nothing broken left behind."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import REPOSITORY, TAG, Checkout

from patches.engine import fetch
from patches.engine.cli import main

ENGINE = 'file="sglang/srt/engine.py"'
AROUND = f'Around({ENGINE}, scope="Engine.run", hook="sglang.hooks:f"),'


def failed(checkout: Checkout, capsys: pytest.CaptureFixture[str], status: int, *words: str) -> str:
    """Compose, expecting ``status`` and a message with all ``words``; an earlier tree must stay as it was."""
    before = checkout.files() if checkout.composed.exists() else None
    assert checkout.engine("compose") == status
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    for word in words:
        assert word in message, message
    after = checkout.files() if checkout.composed.exists() else None
    assert after == before
    if (checkout.root / "build").exists():
        assert not list((checkout.root / "build").glob(".composing-*"))
    return message


def test_anchor_missing(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", f'Around({ENGINE}, scope="Engine.runn", hook="sglang.hooks:f"),').write()
    failed(
        checkout, capsys, 1, "'the-topic'", "sglang 1.0", "file:   sglang/srt/engine.py", "in:     Engine.runn",
        "sought: definition of Engine.runn", "found:  nothing", "near:   Engine.run", "remedy: ",
    )  # fmt: skip


def test_match_missing(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    edit = f'InsertAfter({ENGINE}, scope="Engine.run", match=Call("stepp"), hook="sglang.hooks:f"),'
    checkout.topic("the-topic", edit).write()
    failed(
        checkout,
        capsys,
        1,
        "sought: call stepp",
        "found:  nothing",
        "near:   self.step",
        "in:     Engine.run",
    )


def test_match_ambiguous(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    edit = f'InsertAfter({ENGINE}, scope="Engine.run", match=Return(), hook="sglang.hooks:f"),'
    checkout.topic("the-topic", edit).write()
    failed(checkout, capsys, 1, "sought: return", "found:  2 places", "`mentions`", "`nth`")


def test_argument_missing(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    edit = f'ReplaceArgument({ENGINE}, scope="Engine.run", match=Call("step"), argument="speed", hook="sglang.hooks:f"),'
    checkout.topic("the-topic", edit).write()
    failed(
        checkout,
        capsys,
        1,
        "argument speed of call step",
        "found:  0 such arguments among 2",
        "near:   factor",
    )


def test_around_a_class(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", f'Around({ENGINE}, scope="Engine", hook="sglang.hooks:f"),').write()
    failed(checkout, capsys, 1, "function Engine", "a class or module")


def test_insert_before_an_elif(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.upstream["sglang/srt/engine.py"] = "if a:\n    pass\nelif b:\n    pass\n"
    edit = f'InsertBefore({ENGINE}, match=Branch(mentions=("b",)), hook="sglang.hooks:f"),'
    checkout.topic("the-topic", edit).write()
    failed(checkout, capsys, 1, "an elif or a statement on its header's line", "enclosing statement")


def test_file_changed(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", AROUND).write()
    pins = checkout.root / "upstream.toml"
    text = pins.read_text()
    line = next(line for line in text.splitlines() if line.startswith('"sglang/srt/engine.py"'))
    pins.write_text(text.replace(line, f'"sglang/srt/engine.py" = "{"0" * 64}"'))
    failed(
        checkout,
        capsys,
        1,
        "file with sha256 000000",
        "found:  sha256 ",
        "engine pin",
        "sglang/srt/engine.py",
    )


def test_file_not_pinned(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", AROUND).write(pin=False)
    failed(checkout, capsys, 1, "no pin for this file", "engine pin")


def test_file_vanished(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", AROUND)
    checkout.upstream["sglang/core/engine.py"] = checkout.upstream.pop("sglang/srt/engine.py")
    checkout.write()
    failed(checkout, capsys, 1, "no such file in upstream", "near:   sglang/core/engine.py")


def test_upstream_does_not_parse(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.upstream["sglang/srt/engine.py"] = "def broken(:\n"
    checkout.topic("the-topic", AROUND).write()
    failed(checkout, capsys, 1, "sglang/srt/engine.py", "does not parse")


def test_upstream_takes_our_name(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.upstream["sglang/srt/engine.py"] += "\n_fork = 1\n"
    checkout.topic("the-topic", AROUND).write()
    failed(checkout, capsys, 1, "already uses the name _fork")


def test_two_topics_at_one_anchor(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("first", AROUND).topic("second", AROUND).write()
    failed(checkout, capsys, 1, "patch 'second'", "topic 'first' (Around)", "stacks_on=('first',)")


def test_two_topics_at_one_statement(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    insert = 'scope="Engine.run", match=Call("step"), hook="sglang.hooks:f"'
    checkout.topic("first", f"InsertAfter({ENGINE}, {insert}),").topic(
        "second", f"InsertBefore({ENGINE}, {insert}),"
    )
    failed(checkout.write(), capsys, 1, "patch 'second'", "topic 'first' (InsertAfter)")


def test_one_edit_twice(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", AROUND + AROUND).write()
    failed(checkout, capsys, 1, "topic 'the-topic' (Around) at the same anchor")


def test_stacking_on_a_later_topic(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("first", AROUND, 'stacks_on=("second",)').topic("second", AROUND).write()
    failed(checkout, capsys, 2, "'first' stacks on 'second'", "not earlier")


@pytest.mark.parametrize(
    "path",
    [
        "sglang/srt/engine.py",
        "sglang/srt/table.json",
        "sglang/srt/engine.py/x.py",
        "sglang/fork/_composed.py",
    ],
)
def test_overlay_clash(checkout: Checkout, capsys: pytest.CaptureFixture[str], path: str) -> None:
    checkout.overlay = {path: "x = 1\n"}
    failed(checkout.write(), capsys, 1, f"overlay file {checkout.root / 'python' / path}", path)


def test_overlay_file_in_place_of_a_folder(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.write()
    (checkout.root / "python" / "sglang" / "srt").write_text("")
    failed(checkout, capsys, 1, "overlay file", "sglang/srt")


def test_overlay_path_twice(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.overlay = {"sglang/mine.py": ""}
    checkout.write()
    second = checkout.root / "sgl-kernel" / "python" / "sglang" / "mine.py"
    second.parent.mkdir(parents=True)
    second.write_text("")
    failed(checkout, capsys, 1, "exists twice", "sglang/mine.py")


def test_wheel_with_a_wrong_hash(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.write()
    wheel = next(checkout.wheels.iterdir())
    wheel.write_bytes(wheel.read_bytes() + b"x")
    failed(checkout, capsys, 1, "is not the pinned wheel", "sha256 is", "upstream.toml says")


def test_directory_without_the_wheel(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.write()
    next(checkout.wheels.iterdir()).unlink()
    failed(checkout, capsys, 1, "does not hold sglang-1.0-", "SGLANG_FORK_WHEELS")


def test_no_network_and_no_wheel(tmp_path: Path) -> None:
    """With an index that is not there, pip cannot fetch, and the message says what to do instead."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "PIP_"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "patches.engine", "check"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "error: could not fetch sglang-" in done.stderr and "SGLANG_FORK_WHEELS" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.whl"))


def test_broken_cache_entry_is_fetched_again(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged wheel in the cache is not trusted."""
    from patches.engine.project import Project

    checkout.write()
    pins = Project(checkout.root).pins()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(fetch.WHEELS_VARIABLE, raising=False)
    asked: list[Path] = []

    def download(_pins: object, _wheel: object, cached: Path) -> Path:
        asked.append(cached)
        return cached

    monkeypatch.setattr(fetch, "_download", download)
    wheel = fetch.pick(pins)
    cached = fetch.fetch(pins, wheel)
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"half a wheel")
    assert fetch.fetch(pins, wheel) == cached and len(asked) == 2
    cached.write_bytes(next(checkout.wheels.iterdir()).read_bytes())
    assert fetch.fetch(pins, wheel) == cached and len(asked) == 2


@pytest.mark.parametrize("tag", ["cp39", "cp314"])
def test_wrong_python(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    checkout.write()
    monkeypatch.setattr(fetch, "running_tag", lambda: tag)
    failed(checkout, capsys, 2, f"no wheel for {tag}", TAG)


def test_wrong_machine(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.write()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    failed(checkout, capsys, 2, "Linux x86_64", "aarch64")


def test_hand_edit_in_the_tree(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.topic("the-topic", AROUND).write()
    assert checkout.engine("compose") == 0
    edited = checkout.composed / "sglang/srt/engine.py"
    edited.write_text(edited.read_text() + "# mine\n")
    (checkout.composed / "sglang/new.py").write_text("")
    failed(checkout, capsys, 1, "edited by hand", "  sglang/srt/engine.py", "  sglang/new.py", "--force")
    assert "# mine" in edited.read_text()
    assert checkout.engine("compose", "--force") == 0
    assert "# mine" not in edited.read_text() and not (checkout.composed / "sglang/new.py").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_read_only_build_folder(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.write()
    build = checkout.root / "build"
    build.mkdir()
    build.chmod(0o555)
    failed(checkout, capsys, 1, f"build folder {build} cannot be written", "make it writable")


def test_build_folder_that_cannot_be_made(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """The superuser's form of a read-only folder: a file stands in its place."""
    checkout.write()
    (checkout.root / "build").write_text("")
    failed(checkout, capsys, 1, f"build folder {checkout.root / 'build'} cannot be written")


def test_failure_while_writing(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle of composing leaves the earlier tree."""
    checkout.write()
    assert checkout.engine("compose") == 0
    checkout.overlay = {"sglang/more.py": ""}
    checkout.write()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    failed(checkout, capsys, 1, "No space left on device", "nothing was changed")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("upstream.toml", None, "upstream.toml is missing"),
        ("upstream.toml", "[upstream\n", "malformed"),
        ("upstream.toml", "[upstream]\n", "malformed"),
        ("patches/series", None, "series is missing"),
        ("patches/series", "the-topic\nthe-topic\n", "twice: the-topic"),
        ("patches/series", "the-topik\n", "did you mean 'the-topic'?"),
        ("patches/series", "\n", "'the-topic' has a file but is not in patches/series"),
        ("patches/topics/the_topic.py", "1 / 0\n", "ZeroDivisionError"),
        ("patches/topics/the_topic.py", "x = 1\n", "defines no TOPIC"),
        ("patches/topics/the_topic.py", 'from patches.engine import *\nTOPIC = Topic(name="b", why="w", upstream="u", retire_when="r", edits=())\n', "TOPIC.name is 'b'"),
        ("patches/topics/the_topic.py", 'from patches.engine import *\nTOPIC = Topic(name="the-topic", why=" ", upstream="u", retire_when="r", edits=())\n', "why is empty"),
        ("patches/topics/the_topic.py", 'from patches.engine import *\nTOPIC = Topic(name="The Topic", why="w", upstream="u", retire_when="r", edits=())\n', "lower-case"),
    ],
)  # fmt: skip
def test_malformed_repository(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], file: str, text: str | None, words: str
) -> None:
    checkout.topic("the-topic", AROUND).write()
    path = checkout.root / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    failed(checkout, capsys, 2, words)


def test_hook_that_nobody_defines(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` looks for the functions that the patches call."""
    checkout.topic("the-topic", AROUND, 'overlay=("sglang/gone/",)').write()
    assert checkout.engine("check") == 1
    error = capsys.readouterr().err
    assert "calls 'sglang.hooks:f', but no file of ours is the module sglang.hooks" in error
    assert "owns sglang/gone/" in error
    checkout.overlay = {"sglang/hooks.py": "def g(): pass\n", "sglang/gone/x.py": ""}
    checkout.write()
    assert checkout.engine("check") == 1
    assert "sglang.hooks defines no f" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("-c",), ("-m",)])
def test_unknown_topic_in_the_switch(checkout: Checkout, flags: tuple[str, ...]) -> None:
    report = 'InsertAtTop(file="sglang/__init__.py", hook="sglang.fork.early:run_diagnostics"),'
    checkout.topic("fork-report", report).topic("the-topic", AROUND).write()
    assert checkout.engine("compose") == 0
    code = "import sglang" if flags == ("-c",) else "sglang.fork"
    done = checkout.python(code, disable="the-topik", flags=flags)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "SGLANG_FORK_DISABLE: unknown topic 'the-topik'. Did you mean 'the-topic'? "
        "Topics of this build: fork-report, the-topic."
    ]


@pytest.mark.parametrize(
    ("file", "shadowed"),
    [("sglang/srt.py", "sglang/srt/"), ("sglang/srt/engine/__init__.py", "sglang/srt/engine.py")],
)
def test_overlay_takes_an_import_name(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], file: str, shadowed: str
) -> None:
    """No path of upstream's is overwritten, yet one of two modules would never be imported."""
    checkout.overlay = {file: ""}
    checkout.write()
    failed(checkout, capsys, 1, f"has the import name of {shadowed},", "give ours another name")


@pytest.mark.parametrize("file", ["upstream.toml", "patches/series"])
def test_file_that_is_not_text(checkout: Checkout, capsys: pytest.CaptureFixture[str], file: str) -> None:
    checkout.write()
    with (checkout.root / file).open("ab") as stream:
        stream.write(b"\xff\xfe")
    failed(checkout, capsys, 2, file, "is not UTF-8 text")


def test_number_in_place_of_a_version(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.write()
    pins = checkout.root / "upstream.toml"
    pins.write_text(pins.read_text().replace('"1.0+verify.9"', "9"))
    failed(checkout, capsys, 2, "malformed", "9 stands where a text is wanted")


@pytest.mark.parametrize("command", ["check", "export", "pin"])
@pytest.mark.parametrize(
    ("fault", "status"), [(OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)]
)
def test_full_disk_and_interruption(
    checkout: Checkout,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    fault: BaseException,
    status: int,
) -> None:
    """Not only composing writes; whatever does ends in one message."""
    checkout.write()
    pins = (checkout.root / "upstream.toml").read_text()

    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("patches.engine.check.archive_sources", fail)
    monkeypatch.setattr("patches.engine.pin.stage", fail)
    monkeypatch.setattr("patches.engine.export._prove", fail)
    assert checkout.engine(command) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert ("No space left" if status == 1 else "interrupted") in error
    assert (checkout.root / "upstream.toml").read_text() == pins
    build = checkout.root / "build"
    assert not build.exists() or (not list(build.glob(".exporting-*")) and not (build / "export").exists())


PIP_SAYS = {
    "dead network": (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<x>: Failed to establish "
        "a new connection: [Errno 111] Connection refused')': /simple/sglang/\n"
        "ERROR: No matching distribution found for sglang==1.0\n",
        "the package index cannot be reached",
    ),
    "unknown version": (
        "ERROR: No matching distribution found for sglang==1.0\n",
        "No matching distribution found for sglang==1.0",
    ),
    "another file": (
        f"ERROR: THESE PACKAGES DO NOT MATCH\n        Expected sha256 {'a' * 64}\n             Got        {'b' * 64}\n",
        f"serves another sglang-1.0-{TAG}-{TAG}-manylinux_2_34_x86_64.whl than the pinned one: its sha256 is bbbb",
    ),
}


@pytest.mark.parametrize("case", PIP_SAYS)
def test_what_pip_says(
    checkout: Checkout,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    """pip's last line is the same for a dead network and a wrong version; ours is not."""
    checkout.write()
    said, wanted = PIP_SAYS[case]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(fetch.WHEELS_VARIABLE, raising=False)
    ended = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: ended)
    assert main(["--root", str(checkout.root), "compose"]) == 1
    message = capsys.readouterr().err
    assert wanted in message, message
    assert (fetch.WHEELS_VARIABLE in message) == (case != "another file")


def test_topic_that_cannot_be_retired(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` wants to know how one tells that a topic is not needed any more."""
    checkout.topic("the-topic", AROUND)
    checkout.topics["the-topic"] = checkout.topics["the-topic"].replace('detect="never"', 'detect=" "')
    checkout.overlay = {"sglang/hooks.py": "def f(): pass\n"}
    checkout.write()
    assert checkout.engine("check") == 1
    assert "'the-topic' does not say how to tell" in capsys.readouterr().err


def test_no_line_end_is_converted() -> None:
    """The tree is pinned byte by byte, also for those whose git converts line ends."""
    assert "* -text" in (REPOSITORY / ".gitattributes").read_text().splitlines()
