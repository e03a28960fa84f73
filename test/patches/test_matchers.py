"""Matchers on synthetic sources: which lines each finds."""

from __future__ import annotations

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider

from patches.engine.matchers import Assign, Branch, Call, Import, Loop, Matcher, Raise, Return, With
from patches.engine.tree import Place, definitions, dotted, mentions

SOURCE = """\
import os.path
from torch import nn as layers

LIMIT = 3

class Worker:
    size: int = 4

    def run(self, batch):
        a, self.b = batch.pair()
        self.runner.run(batch)
        run(batch, mode="fast")
        if batch.mode == "draft" and self.size > 2:
            raise ValueError(batch.mode)
        elif batch.done:
            return batch
        for item in batch.items:
            item.count += 1
        while self.size:
            self.size -= 1
        with torch.no_grad(), self.lock:
            table[item.key] = run
        values = [run(x) for x in batch]
        self.hook = lambda: run(None)

        def helper():
            run("nested")
            return LIMIT

        return helper
"""

RUN = "Worker.run"

CASES = [
    # scope, matcher, lines that it finds
    (RUN, Call("run"), [11, 12, 23, 24]),
    (RUN, Call("runner.run"), [11]),
    (RUN, Call("self.runner.run"), [11]),
    (RUN, Call("unner.run"), []),
    (RUN, Call("run", mentions=("mode",)), [12]),
    (RUN, Call("run", mentions=("'fast'",)), [12]),
    (RUN, Call("run", mentions=("'slow'",)), []),
    (RUN, Call("run", nth=1, because="two calls of run differ in arguments only"), [12]),
    (RUN, Call("run", nth=9, because="out of range"), []),
    ("Worker.run.helper", Call("run"), [27]),
    ("", Call("run"), []),
    (RUN, Assign("a"), [10]),
    (RUN, Assign("b"), [10]),
    (RUN, Assign("self.b"), [10]),
    (RUN, Assign("count"), [18]),
    (RUN, Assign("table"), [22]),
    (RUN, Assign("size"), [20]),
    ("Worker", Assign("size"), [7]),
    ("", Assign("LIMIT"), [4]),
    (RUN, Branch(), [13, 15]),
    (RUN, Branch(mentions=("mode", "size")), [13]),
    (RUN, Branch(mentions=("'draft'",)), [13]),
    (RUN, Branch(mentions=("done",)), [15]),
    (RUN, Branch(mentions=("ValueError",)), []),
    (RUN, Return(mentions=("helper",)), [30]),
    (RUN, Return(), [16, 30]),
    ("Worker.run.helper", Return(mentions=("LIMIT",)), [28]),
    (RUN, Raise(mentions=("ValueError",)), [14]),
    (RUN, Loop(), [17, 19]),
    (RUN, Loop(mentions=("items",)), [17]),
    (RUN, With(mentions=("no_grad",)), [21]),
    (RUN, With(mentions=("table",)), []),
    ("", Import("os.path"), [1]),
    ("", Import("nn"), [2]),
    ("", Import("torch"), [2]),
]


@pytest.fixture(scope="module")
def parsed() -> tuple[cst.Module, dict[cst.CSTNode, int]]:
    """The module, and the line of each of its nodes."""
    wrapper = MetadataWrapper(cst.parse_module(SOURCE), unsafe_skip_copy=True)
    places = wrapper.resolve(PositionProvider)
    return wrapper.module, {node: place.start.line for node, place in places.items()}


@pytest.mark.parametrize(
    ("scope", "matcher", "lines"), CASES, ids=lambda value: value if isinstance(value, str) else None
)
def test_finds(
    parsed: tuple[cst.Module, dict[cst.CSTNode, int]], scope: str, matcher: Matcher, lines: list[int]
) -> None:
    module, where = parsed
    root = Place(module, ())
    place = root if not scope else dict(definitions(root))[scope]
    assert [where[found.node] for found in matcher.find(place)] == lines


def test_qualified_names(parsed: tuple[cst.Module, dict[cst.CSTNode, int]]) -> None:
    names = [name for name, _ in definitions(Place(parsed[0], ()))]
    assert names == ["Worker", "Worker.run", "Worker.run.helper"]


def test_definitions_inside_blocks_are_found() -> None:
    module = cst.parse_module(
        "if x:\n    def a(): pass\nelse:\n    def a(): pass\ntry:\n    class B: pass\nfinally:\n    pass\n"
    )
    assert [name for name, _ in definitions(Place(module, ()))] == ["a", "a", "B"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a", "a"),
        ("a.b.c", "a.b.c"),
        ("f().x", "f().x"),
        ("a[0].b", "a[].b"),
        ("(1).real", "?.real"),
        ("1", None),
    ],
)
def test_dotted(text: str, name: str | None) -> None:
    assert dotted(cst.parse_expression(text)) == name


@pytest.mark.parametrize(
    ("text", "wanted", "held"),
    [
        ("x.mode == 'a'", "mode", True),
        ("x.mode == 'a'", "x.mode", True),
        ("x.mode == 'a'", "ode", False),
        ("x.mode == 'a'", "'a'", True),
        ("x.mode == 'a'", '"a"', True),
        ("x.mode == 'a'", "a", False),
        ("x.mode.value", "mode", True),
    ],
)
def test_mentions(text: str, wanted: str, held: bool) -> None:
    assert mentions(cst.parse_expression(text), wanted) is held


def test_nth_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="because"):
        Call("f", nth=1)
    with pytest.raises(ValueError, match="nth"):
        Call("f", because="no number given")


def test_mentions_is_a_tuple() -> None:
    with pytest.raises(TypeError, match="tuple"):
        Call("f", mentions="x")  # type: ignore[arg-type]
