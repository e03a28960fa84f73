"""Composing against another upstream version: a table of what still resolves, never a crash."""

from __future__ import annotations

import pytest
from checkout import Checkout

ENGINE = 'file="sglang/srt/engine.py"'


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """Three topics of one edit each."""
    checkout.overlay = {"sglang/hooks.py": "def f(original, *args): return original(*args)\n"}
    for name, scope in (("run", "Engine.run"), ("step", "Engine.step"), ("outer", "outer.inner")):
        checkout.topic(f"the-{name}", f'Around({ENGINE}, scope="{scope}", hook="sglang.hooks:f"),')
    return checkout.write()


def lines(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, str], str]:
    """Exit status, state by topic, and the closing line, for version 1.1 of the make-believe upstream."""
    wheel = checkout.wheel(version="1.1")
    capsys.readouterr()
    status = checkout.engine("forward", "--wheel", str(wheel), *flags)
    out = capsys.readouterr().out.splitlines()
    states = {line.split()[0]: line for line in out if line.startswith("the-")}
    return status, states, "\n".join(out[len(states) + 1 :])


def test_unrelated_change(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    ready.upstream["sglang/srt/engine.py"] += "\n\nADDED = 1\n"
    status, states, end = lines(ready, capsys, "--strict")
    assert status == 0 and all(line.endswith(" ok") for line in states.values())
    assert end == "sglang 1.1: 3 of 3 topics apply: the-run, the-step, the-outer"


def test_renamed_and_duplicated(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    text = ready.upstream["sglang/srt/engine.py"].replace("def step", "def stride")
    ready.upstream["sglang/srt/engine.py"] = text + "\n\ndef outer():\n    def inner(): pass\n"
    status, states, end = lines(ready, capsys)
    assert status == 0
    assert states["the-run"].endswith(" ok")
    assert states["the-step"].endswith("found nothing")
    assert states["the-outer"].endswith("found 2 places")
    assert end == "sglang 1.1: 1 of 3 topics apply: the-run"
    assert lines(ready, capsys, "--strict")[0] == 1


def test_file_gone(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    del ready.upstream["sglang/srt/engine.py"]
    status, states, end = lines(ready, capsys)
    assert status == 0 and all("no such file" in line for line in states.values())
    assert end.startswith("sglang 1.1: 0 of 3 topics apply")


def test_file_that_does_not_parse(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    ready.upstream["sglang/srt/engine.py"] = "def (\n"
    status, states, _ = lines(ready, capsys)
    assert status == 0 and all("does not parse" in line for line in states.values())


def test_upstream_takes_a_path_of_ours(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    ready.upstream["sglang/hooks.py"] = ""
    _, _, end = lines(ready, capsys)
    assert end.startswith("also: overlay file ") and "sglang/hooks.py" in end


def test_topic_that_upstream_made_needless(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    more = 'not_needed=Mentions("sglang/srt/engine.py", "Engine.step", "cache")'
    ready.topic("the-step", f'Around({ENGINE}, scope="Engine.step", hook="sglang.hooks:f"),', more).write()
    ready.upstream["sglang/srt/engine.py"] = ready.upstream["sglang/srt/engine.py"].replace(
        "return value * factor", "return self.cache[value] * factor"
    )
    _, states, _ = lines(ready, capsys)
    assert states["the-step"].endswith("not needed")


@pytest.mark.parametrize("name", ["missing.whl", "sglang-1.1-x.txt"])
def test_not_a_wheel(ready: Checkout, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert ready.engine("forward", "--wheel", str(ready.wheels / name)) == 2
    assert "is not an sglang wheel" in capsys.readouterr().err


def test_damaged_wheel(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    path = ready.wheels / "sglang-1.1-cp311-cp311-any.whl"
    path.write_bytes(b"PK nothing")
    assert ready.engine("forward", "--wheel", str(path)) == 1
    assert "cannot be read as a wheel" in capsys.readouterr().err


def test_needless_topics_are_named_apart(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """They count among neither those that apply nor the faults."""
    ready.topics["the-step"] = ready.topics["the-step"].replace(
        'detect="never"', 'not_needed=Mentions("sglang/srt/engine.py", "Engine.step", "brake")'
    )
    ready.write()
    ready.upstream["sglang/srt/engine.py"] = ready.upstream["sglang/srt/engine.py"].replace(
        "return value * factor", "return brake(value * factor)"
    )
    status, states, end = lines(ready, capsys, "--strict")
    assert status == 0 and states["the-step"].endswith("not needed")
    assert end == "sglang 1.1: 2 of 3 topics apply: the-run, the-outer; not needed: the-step"


def test_the_named_directory_holds_other_versions_too(
    ready: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network the look forward works as composing does."""
    monkeypatch.setenv("SGLANG_FORK_WHEELS", str(ready.wheels))
    assert ready.engine("forward", "--version", "1.1") == 1
    assert "does not hold sglang-1.1-" in capsys.readouterr().err
    ready.wheel(version="1.1")
    assert ready.engine("forward", "--version", "1.1") == 0
    assert "sglang 1.1: 3 of 3 topics apply" in capsys.readouterr().out
    assert ready.engine("forward", "--version", "../1.1") == 2
