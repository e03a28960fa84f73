"""Applies a series of topics to pristine upstream sources."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst

from patches.engine.actions import Action, apply
from patches.engine.edits import AddImport, Edit, InsertAtTop, NotFound
from patches.engine.errors import AnchorError, EngineError
from patches.engine.hashes import digest
from patches.engine.inserted import ALIAS, fork_import
from patches.engine.model import Sources, Topic
from patches.engine.tree import Place


@dataclass(frozen=True)
class TopicResult:
    """What became of one topic: ``applied`` or ``not needed``, with the reason."""

    topic: Topic
    state: str
    reason: str


@dataclass
class Patched:
    """Changed files and the fate of each topic."""

    files: dict[str, bytes] = field(default_factory=dict)
    topics: list[TopicResult] = field(default_factory=list)


def check_pins(topics: list[Topic], sources: Sources, pins: dict[str, str], base: str) -> None:
    """Check the pinned hash of every file that an edit touches. Raises AnchorError."""
    for topic in topics:
        for edit in topic.edits:
            check_pin(topic, edit, sources, pins, base)


def check_pin(topic: Topic, edit: Edit, sources: Sources, pins: dict[str, str], base: str) -> None:
    """Compare the file that ``edit`` touches with its pinned hash.

    Raises:
        AnchorError: the file is gone, is not pinned, or is not the pinned one.
    """
    check_file(topic, edit, sources, base)
    pinned, actual = pins.get(edit.file), digest(sources.files[edit.file])
    if pinned == actual:
        return
    raise AnchorError(
        topic=topic.name,
        file=edit.file,
        scope=edit.scope,
        sought=f"file with sha256 {pinned}" if pinned else "a pinned hash in upstream.toml",
        found=f"sha256 {actual}" if pinned else "no pin for this file",
        base=base,
        remedy="read what changed in the file, then record it with `python -m patches.engine pin`",
    )


def check_file(topic: Topic, edit: Edit, sources: Sources, base: str) -> None:
    """Raises AnchorError if upstream lacks the file that ``edit`` names."""
    if sources.has(edit.file):
        return
    name = edit.file.rpartition("/")[2]
    near = tuple(sorted(file for file in sources.files if file.endswith("/" + name)))[:5]
    raise AnchorError(
        topic=topic.name,
        file=edit.file,
        scope=edit.scope,
        sought="the file",
        found="no such file in upstream",
        base=base,
        remedy="name the file's new place, or retire the topic if upstream dropped what it changed",
        near=near,
    )


def resolve(topic: Topic, edit: Edit, sources: Sources, base: str) -> tuple[Place, list[Action]]:
    """The anchor and the changes of one edit. Raises AnchorError."""
    check_file(topic, edit, sources, base)
    try:
        module = sources.module(edit.file)
        return edit.anchor(module), edit.actions(module, topic.name)
    except cst.ParserSyntaxError as error:
        raise EngineError(f"{edit.file} of sglang {base} does not parse: {error}") from error
    except NotFound as error:
        raise AnchorError(
            topic=topic.name,
            file=edit.file,
            scope=edit.scope,
            sought=error.sought,
            found=error.found,
            base=base,
            remedy=error.remedy,
            near=tuple(error.near),
        ) from error


def patch(topics: list[Topic], sources: Sources, base: str) -> Patched:
    """Apply all topics.

    Raises:
        AnchorError: an anchor is missing or ambiguous.
        EngineError: two topics meet at one anchor, or the result does not compile.
    """
    result = Patched()
    actions: dict[str, list[Action]] = {}
    owners: dict[tuple[str, int], list[tuple[Topic, Edit]]] = {}
    for topic in topics:
        reason = topic.not_needed.reason(sources) if topic.not_needed is not None else None
        if reason is not None:
            result.topics.append(TopicResult(topic, "not needed", reason))
            continue
        for edit in topic.edits:
            place, changes = resolve(topic, edit, sources, base)
            if not isinstance(edit, (AddImport, InsertAtTop)):
                _claim(owners.setdefault((edit.file, id(place.node)), []), topic, edit, base)
            if edit.file not in actions:
                _check_alias(sources, edit.file, base)
                actions[edit.file] = [fork_import(sources.module(edit.file), topic.name)]
            actions[edit.file] += changes
        count = len(topic.edits)
        result.topics.append(TopicResult(topic, "applied", f"{count} edit{'s' if count != 1 else ''}"))
    for file, changes in actions.items():
        text = apply(sources.module(file), changes).bytes
        try:
            compile(text, file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise EngineError(f"{file} does not compile after patching: {error}") from error
        result.files[file] = text
    return result


def _claim(holders: list[tuple[Topic, Edit]], topic: Topic, edit: Edit, base: str) -> None:
    """Refuse a second claim on an anchor, unless the later topic says that it stacks on the earlier."""
    for other, earlier in holders:
        same = other is topic and type(earlier) is not type(edit)
        if same or other.name in topic.stacks_on:
            continue
        raise AnchorError(
            topic=topic.name,
            file=edit.file,
            scope=edit.scope,
            sought=f"{edit.describe()}, for itself",
            found=f"topic {other.name!r} ({earlier.kind()}) at the same anchor",
            base=base,
            remedy=(
                "merge the two edits, or move one; if both must stand there, let the later topic say "
                f"stacks_on=({other.name!r},)"
            ),
        )
    holders.append((topic, edit))


def _check_alias(sources: Sources, file: str, base: str) -> None:
    if re.search(rf"\b{ALIAS}\b".encode(), sources.files[file]):
        raise EngineError(
            f"{file} of sglang {base} already uses the name {ALIAS}: rename ALIAS in the engine"
        )
