"""Looks at every edit of every topic, without stopping at the first that fails."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patches.engine.edits import Edit
from patches.engine.errors import AnchorError, EngineError
from patches.engine.model import Sources, Topic
from patches.engine.patcher import check_pin, patch, resolve
from patches.engine.project import Project

NOT_NEEDED = "not needed"
PACKAGE_PREFIX = "sglang/"


@dataclass(frozen=True)
class Row:
    """One edit of one topic: ``ok``, ``not needed``, or what is wrong."""

    topic: str
    kind: str
    file: str
    scope: str
    sought: str
    state: str
    fault: EngineError | None = None

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the edit."""
        return self.fault is None


def archive_sources(archive: Path) -> Sources:
    """Upstream's files straight from a wheel; only Python files are read.

    Raises:
        EngineError: the file is not a wheel.
    """
    try:
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(PACKAGE_PREFIX) and name[-1] != "/"]
            return Sources({name: wheel.read(name) if name.endswith(".py") else b"" for name in names})
    except (OSError, zipfile.BadZipFile) as error:
        raise EngineError(f"{archive} cannot be read as a wheel: {error}") from error


def survey(topics: list[Topic], sources: Sources, base: str, pins: dict[str, str] | None) -> list[Row]:
    """One row for each edit; ``pins`` of None waives the file hashes."""
    rows = []
    for topic in topics:
        reason = topic.not_needed.reason(sources) if topic.not_needed is not None else None
        for edit in topic.edits:
            state, fault = "ok", None
            if reason is not None:
                state = NOT_NEEDED
            else:
                try:
                    resolve(topic, edit, sources, base)
                    if pins is not None:
                        check_pin(topic, edit, sources, pins, base)
                except EngineError as error:
                    state, fault = _short(error), error
            sought = edit.describe().removesuffix(f" of {edit.scope}")  # the table has a column for the scope
            rows.append(Row(topic.name, edit.kind(), edit.file, edit.scope, sought, state, fault))
    return rows


def _short(error: EngineError) -> str:
    return f"found {error.found}" if isinstance(error, AnchorError) else str(error).splitlines()[0]


def applicable(topics: list[Topic], rows: list[Row]) -> list[Topic]:
    """Topics of which every edit resolved."""
    failed = {row.topic for row in rows if not row.good}
    return [topic for topic in topics if topic.name not in failed]


def try_together(topics: list[Topic], sources: Sources, base: str) -> str | None:
    """Patch and compile all these topics together; the fault in words, or None."""
    try:
        patch(topics, sources, base)
    except EngineError as error:
        return str(error)
    return None


def missing_hooks(topics: list[Topic], project: Project, sources: Sources) -> Iterator[str]:
    """Hooks and modules named by edits that no file of ours defines, and owned overlay paths that do not exist."""
    overlay = project.overlay()
    names: dict[str, set[str]] = {}
    for topic in topics:
        for owned in topic.overlay:
            if not any(name == owned or (owned.endswith("/") and name.startswith(owned)) for name in overlay):
                yield f"topic {topic.name!r} owns {owned}, but there is no such file in python/ or sgl-kernel/python/"
        for edit in topic.edits:
            yield from _missing_hook(topic, edit, overlay, names)


def _missing_hook(
    topic: Topic, edit: Edit, overlay: dict[str, Path], names: dict[str, set[str]]
) -> Iterator[str]:
    target = getattr(edit, "hook", None) or getattr(edit, "module", None)
    if target is None:
        return
    module, _, function = str(target).partition(":")
    stem = module.replace(".", "/")
    path = overlay.get(f"{stem}.py") or overlay.get(f"{stem}/__init__.py")
    if path is None:
        yield f"topic {topic.name!r} calls {target!r}, but no file of ours is the module {module}"
        return
    if not function:
        return
    if module not in names:
        names[module] = _top_level(path)
    if function.partition(".")[0] not in names[module]:
        yield f"topic {topic.name!r} calls {target!r}, but {module} defines no {function}"


def _top_level(path: Path) -> set[str]:
    """Names that a module binds at its top level."""
    bound: set[str] = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound.update(target.id for target in targets if isinstance(target, ast.Name))
    return bound


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [("topic", "edit", "file", "in", "anchor", "state")]
    lines += [(r.topic, r.kind, r.file, r.scope or "module level", r.sought, r.state) for r in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
