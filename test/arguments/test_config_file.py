"""Faults of a ``--config`` file: each told in a sentence, where upstream ignores it, misreads it or breaks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import LLAMA, write
from sglang.srt import server_args as upstream
from sglang.srt.speculative.arguments import config_file
from sglang.srt.speculative.arguments.faults import ArgumentFault

OPTIONS = ("--context-length", "--model-path", "--tp-size", "--config")


@dataclass(frozen=True)
class Case:
    """Contents of a file, or a command line with ``{f}`` for its path, and the code it is refused by."""

    name: str
    code: str | None
    text: str = "model-path: m\n"
    argv: tuple[str, ...] = ("--config", "{f}")
    says: str = ""


CASES = (
    Case("good", None),
    Case("empty", None, text=""),
    Case("absent", None, argv=("--tp-size", "2")),
    Case("one word", "config-form", argv=("--config={f}",), says="two words"),
    Case("no path", "config-form", argv=("--config",)),
    Case("twice", "config-form", argv=("--config", "{f}", "--config", "{f}")),
    Case("not yaml by name", "config-path", argv=("--config", "{f}.json")),
    Case("missing", "config-path", argv=("--config", "{d}/fil.yaml"), says="did you mean {f}?"),
    Case("broken", "config-yaml", text="a: [1\n", says="cannot be read as YAML"),
    Case("list", "config-yaml", text="- a\n"),
    Case("number", "config-yaml", text="1\n"),
    Case(
        "unknown",
        "config-key",
        text="model-path: m\ncontext-lenght: 1\n",
        says="did you mean context-length?",
    ),
    Case("prefix", "config-key", text="context: 1\n"),
    Case("underscore", "config-key", text="tp_size: 8\n", says="did you mean tp-size?"),
    Case("repeated", "config-key", text="tp-size: 8\nmodel-path: m\ntp-size: 4\n", says="line 3"),
    Case("no value", "config-value", text="model-path: m\ncontext-length:\n", says="line 2"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_check(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(case.text, encoding="utf-8")
    argv = [word.format(f=file, d=tmp_path) for word in case.argv]
    if case.code is None:
        config_file.check(argv, OPTIONS)
        return
    with pytest.raises(ArgumentFault) as caught:
        config_file.check(argv, OPTIONS)
    assert caught.value.code == case.code
    assert case.says.format(f=file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_through_the_servers_own_way_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write(tmp_path / "target", LLAMA, {"model.norm.weight": ("BF16", (32,), None)})
    file = tmp_path / "file.yaml"
    file.write_text(f"device: cpu\nmodel-path: {target}\nport: 1\n", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        upstream.prepare_server_args([f"--config={file}"])
    assert caught.value.code == 2
    assert "two words" in capsys.readouterr().err


def test_upstream_alone_ignores_the_file(tmp_path: Path) -> None:
    """Negative control: ``--config=FILE`` is parsed and never read, so upstream misses the model."""
    file = tmp_path / "file.yaml"
    file.write_text("model-path: m\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        upstream.prepare_server_args.__wrapped__([f"--config={file}"])


def test_an_option_upstream_refuses_in_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Upstream's merger takes no option that shares its place with a deprecated alias."""
    file = tmp_path / "file.yaml"
    file.write_text("model-path: m\ncuda-graph-max-bs-decode: 8\n", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        upstream.prepare_server_args(["--config", str(file)])
    assert caught.value.code == 2
    assert "Unsupported config option" in capsys.readouterr().err
