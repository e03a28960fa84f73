"""Checks the patches against the pinned base: anchors, file hashes, compilation, hooks, the tree's hash."""

from __future__ import annotations

import tempfile
from pathlib import Path

from patches.engine.compose import hand_edits, read_manifest, refuse_clashes, stage
from patches.engine.errors import EngineError
from patches.engine.fetch import fetch, pick
from patches.engine.hashes import file_digest, list_files, tree_hash
from patches.engine.project import Project
from patches.engine.survey import Row, archive_sources, missing_hooks, survey


def check(project: Project, *, wheel_directory: Path | None = None) -> tuple[list[Row], list[str]]:
    """Rows for all edits, and every fault found, as messages."""
    pins = project.pins()
    topics = project.topics()
    archive = fetch(pins, pick(pins), wheel_directory)
    sources = archive_sources(archive)
    rows = survey(topics, sources, pins.base, pins.files)
    faults = [str(row.fault) for row in rows if row.fault is not None]
    faults += [
        f"topic {topic.name!r} does not say how to tell that it is not needed any more: fill in `detect`"
        for topic in topics
        if not topic.detect.strip() and topic.not_needed is None
    ]
    faults += missing_hooks(topics, project, sources)
    touched = {file for topic in topics for file in topic.files}
    faults += [
        f"upstream.toml pins {file}, which no topic touches: pin anew"
        for file in sorted(set(pins.files) - touched)
    ]
    try:
        refuse_clashes(project.overlay(), sources, pins.base)
    except EngineError as error:
        faults.append(str(error))
    if not faults:
        faults += _tree_faults(project, archive)
    manifest = read_manifest(project.composed)
    if manifest is not None:
        edited = hand_edits(project.composed, manifest.files)
        if edited:
            faults.append(f"{project.composed} was edited by hand: {', '.join(edited[:5])}")
    return rows, faults


def _tree_faults(project: Project, archive: Path) -> list[str]:
    pins = project.pins()
    with tempfile.TemporaryDirectory(prefix="sglang-fork-check-") as scratch:
        target = Path(scratch)
        try:
            stage(target, archive, pins, project.topics(), project.overlay())
        except EngineError as error:
            return [str(error)]
        tree = tree_hash({name: file_digest(target / name) for name in list_files(target)})
    if tree == pins.composed:
        return []
    return [
        f"the composed tree has hash {tree}, upstream.toml pins {pins.composed or 'none'}; "
        "record it with `python -m patches.engine pin`"
    ]
