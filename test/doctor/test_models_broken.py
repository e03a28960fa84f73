"""A ``config.json`` of any form beside real weights: a sentence about it, and never an exception."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.verify_doctor import __main__ as doctor
from sglang.verify_doctor import checks
from sglang.verify_doctor.facts import models
from sglang.verify_doctor.findings import Level

SHIPPED = Path(__file__).parents[2] / "models"
WRONG: tuple[Any, ...] = (
    None,
    "x",
    "",
    0,
    -1,
    2.5,
    1e308,
    True,
    [],
    {},
    [None],
    [[1]],
    {"a": 1},
    10**30,
    "\ud800",
)
# Parts that the shipped models do not have, and others do.
MORE = {
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "quantization_config": {"quant_method": "fp8", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
    "auto_map": {"AutoConfig": "x.y"},
}
CHANGES = 25
FOUND = (
    ("nano-eagle3", ("draft_vocab_size",), "x"),
    ("nano-eagle3", ("num_key_value_heads",), [1]),
    ("nano-eagle3", ("head_dim",), {"a": 1}),
    ("nano-eagle3", ("num_attention_heads",), 2.5),
    ("nano", ("rope_scaling", "factor"), "x"),
    ("nano", ("rope_scaling", "factor"), 1e308),
)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Path]:
    """The shipped models, each with a description that may be written to."""
    for name in ("nano", "nano-eagle3"):
        shutil.copytree(SHIPPED / name, tmp_path / name)
    return {name: tmp_path / name / "config.json" for name in ("nano", "nano-eagle3")}


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*path, name)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, name))


def broken(file: Path, path: tuple[Any, ...], value: Any) -> Any:
    """The file's content with another value at a place."""
    content = copy.deepcopy(json.loads(file.read_text(encoding="utf-8")) | MORE)
    holder: Any = content
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return content


def judged(pair: dict[str, Path], which: str, path: tuple[Any, ...], value: Any) -> None:
    file = pair[which]
    whole = file.read_text(encoding="utf-8")
    file.write_text(json.dumps(broken(file, path, value)), encoding="utf-8")
    found = models.gather(str(pair["nano"].parent), str(pair["nano-eagle3"].parent))
    for finding in checks.judge({"models": found}, "cpu"):
        assert finding.about != "facts", finding
        assert finding.cure or finding.level in (Level.OK, Level.NOTE)
    file.write_text(whole, encoding="utf-8")


@pytest.mark.parametrize("which", ["nano", "nano-eagle3"])
def test_any_value_at_any_place(which: str, pair: dict[str, Path]) -> None:
    whole = json.loads(pair[which].read_text(encoding="utf-8")) | MORE
    everywhere, drawn = list(places(whole)), random.Random(which)
    for _ in range(CHANGES):
        judged(pair, which, drawn.choice(everywhere), drawn.choice(WRONG))


@pytest.mark.parametrize(("which", "path", "value"), FOUND)
def test_what_once_ended_in_an_exception(
    which: str, path: tuple[Any, ...], value: Any, pair: dict[str, Path]
) -> None:
    judged(pair, which, path, value)


def test_files_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised over them costs only what would have been said about them."""

    def stumble(*_: object) -> None:
        raise LookupError("a form of 2031")

    monkeypatch.setattr(models, "gather", stumble)
    options = doctor.parser().parse_args(["--model-path", str(SHIPPED / "nano")])
    facts: dict[str, Any] = {"deployment": {}}
    doctor._models(facts, options)
    (found,) = [f for f in checks.judge(facts, "cpu") if f.about == "model"]
    assert found.level is Level.WARNING and "a form of 2031" in found.found
