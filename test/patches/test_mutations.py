"""Every edit of every real topic, on a mutated copy of the upstream file: the engine must refuse.

Three mutations: the anchor renamed, the match duplicated, one byte changed. New topics are covered
without a line here.
"""

from __future__ import annotations

import re

import libcst as cst
import pytest
from checkout import REPOSITORY

from patches.engine.actions import Action, apply
from patches.engine.edits import AddField, AddImport, Around, Edit, InsertAtTop
from patches.engine.errors import AnchorError
from patches.engine.matchers import Matcher
from patches.engine.model import Sources, Topic
from patches.engine.patcher import check_pin, patch, resolve
from patches.engine.project import Project
from patches.engine.tree import statement

TOPICS = Project(REPOSITORY).topics()
EDITS = [
    pytest.param(topic, edit, id=f"{topic.name}-{index}-{edit.kind()}")
    for topic in TOPICS
    for index, edit in enumerate(topic.edits)
]
ANCHORED = [param for param in EDITS if not isinstance(param.values[1], (AddImport, InsertAtTop))]


def matcher(edit: Edit) -> Matcher | None:
    """The edit's matcher, if its kind has one."""
    found = getattr(edit, "match", None)
    return found if isinstance(found, Matcher) else None


def key_name(edit: Edit) -> str:
    """A name without which the anchor cannot be found."""
    match = matcher(edit)
    wanted = edit.scope
    if match is not None:
        wanted = match.target() or (match.mentions[0] if match.mentions else edit.scope)
    return re.split(r"[.\"']", wanted.strip("\"'"))[-1]


@pytest.mark.parametrize(("topic", "edit"), EDITS)
def test_resolves_on_the_pinned_base(topic: Topic, edit: Edit, sources: Sources, project: Project) -> None:
    """The control: without a mutation the same calls succeed."""
    pins = project.pins()
    check_pin(topic, edit, sources, pins.files, pins.base)
    _, actions = resolve(topic, edit, sources, pins.base)
    assert actions


@pytest.mark.parametrize(("topic", "edit"), ANCHORED)
def test_renamed_anchor(topic: Topic, edit: Edit, sources: Sources) -> None:
    name = key_name(edit).encode()
    changed = re.sub(rb"\b" + re.escape(name) + rb"\b", name + b"_renamed", sources.files[edit.file])
    assert changed != sources.files[edit.file]
    with pytest.raises(AnchorError) as caught:
        resolve(topic, edit, Sources({edit.file: changed}), "0.0.test")
    error = caught.value
    assert (error.topic, error.file, error.scope, error.base) == (
        topic.name,
        edit.file,
        edit.scope,
        "0.0.test",
    )
    assert error.found.startswith(("nothing", "0 ", "no annotated")) and error.remedy
    assert not isinstance(edit, Around) or any(key_name(edit) in near for near in error.near)


@pytest.mark.parametrize(("topic", "edit"), ANCHORED)
def test_duplicated_match(topic: Topic, edit: Edit, sources: Sources) -> None:
    match = matcher(edit)
    if isinstance(edit, AddField) or (match is not None and match.nth is not None):
        pytest.skip("stands at the last field, or picks by number")
    module = sources.module(edit.file)
    place = statement(edit.anchor(module))
    twice = apply(module, [Action(place, after=(place.node.deep_clone(),))])  # type: ignore[arg-type]
    with pytest.raises(AnchorError, match="2 places") as caught:
        resolve(topic, edit, Sources({edit.file: twice.bytes}), "0.0.test")
    assert caught.value.file == edit.file


@pytest.mark.parametrize(("topic", "edit"), EDITS)
def test_one_byte(topic: Topic, edit: Edit, sources: Sources, project: Project) -> None:
    changed = Sources({edit.file: sources.files[edit.file] + b"\n"})
    with pytest.raises(AnchorError, match="sha256") as caught:
        check_pin(topic, edit, changed, project.pins().files, "0.0.test")
    assert "engine pin" in caught.value.remedy


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_each_topic_stands_alone(topic: Topic, sources: Sources) -> None:
    """Without the others (their shared anchors aside) the topic applies and compiles."""
    patched = patch([topic], sources, "0.0.test")
    for file, text in patched.files.items():
        before, after = sources.files[file].splitlines(), text.splitlines()
        added = [line for line in after if f"# fork: {topic.name}".encode() in line]
        assert added and len(after) - len(before) <= len(added)
        assert cst.parse_module(text).bytes == text
