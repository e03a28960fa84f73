"""Faults of a ``--config`` file: each told in a sentence, where upstream ignores it, misreads it or breaks."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import LLAMA, write
from sglang.srt import server_args as upstream
from sglang.srt.speculative.arguments import config_file
from sglang.srt.speculative.arguments.faults import ArgumentFault


def _options() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--model-path", type=str)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--share", type=float)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--graph", type=json.loads)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--trust", action="store_true")
    return {option: action for action in parser._actions for option in action.option_strings}


OPTIONS = _options()


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
    Case("not a number", "config-value", text="tp-size: two\n", says="a whole number belongs"),
    Case(
        "a tag of somebody's own",
        "config-yaml",
        text="model-path: !env MODEL\n",
        says="cannot be read as YAML",
    ),
    Case("a month too many", "config-yaml", text="model-path: 2024-13-01\n", says="month"),
    Case("a key within that is a list", "config-yaml", text="graph: {{[a]: b}}\n"),
    Case("a list of one", None, text="tp-size: [2]\n"),
    Case("half a number", "config-value", text="tp-size: 2.5\n", says="a whole number belongs"),
    Case("not a share", "config-value", text="share: most\n", says="a number belongs"),
    Case("list", "config-value", text="tp-size: [1, 2]\n", says="takes one value"),
    Case("mapping", "config-value", text="tp-size: {a: 1}\n", says="takes a number"),
    Case("one of a list", "config-value", text="sizes: [1, x]\n", says="is x"),
    Case("no switch", "config-value", text="trust: maybe\n", says="write true"),
    Case("a number as a switch", "config-value", text="trust: 1\n", says="write true"),
    Case("choice", "config-value", text="device: cud\n", says="did you mean cuda?"),
    Case("not JSON", "config-value", text="graph: '{'\n", says="JSON belongs"),
    Case("values that YAML reads", None, text="tp-size: 0x2\nshare: 1\ntrust: no\nsizes: [1, 0b1]\n"),
    Case("mapping as JSON", None, text="graph: {decode: {bs: [1]}}\n"),
    Case("names itself", "config-key", text="config: {f}\n", says="cannot name another"),
    Case("a key that is no word", "config-key", text="1: 2\n", says="no option"),
    Case("a key that is a list", "config-key", text="? [a]\n: 1\n", says="is no word"),
    Case("merge key", "config-key", text="<<: {{tp-size: 2}}\n", says="no option"),
    Case("no text", "config-yaml", text="\x00"),
    Case("a tab", "config-yaml", text="\ttp-size: 1\n"),
    Case("too deep", "config-yaml", text="[" * 2000),
    Case("a directory", "config-path", argv=("--config", "{d}/d.yaml"), says="did you mean {f}?"),
    Case("too long a name", "config-path", argv=("--config", "x" * 5000 + ".yaml"), says="..."),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_check(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    text = case.text.format(f=file) if "{f}" in case.text or "{{" in case.text else case.text
    file.write_text(text, encoding="utf-8")
    (tmp_path / "d.yaml").mkdir()
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
