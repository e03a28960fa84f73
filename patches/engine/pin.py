"""Writes upstream.toml: hashes of wheels, of every upstream file that a patch touches, of the composed tree."""

from __future__ import annotations

import os
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from patches.engine.compose import stage
from patches.engine.errors import UsageError
from patches.engine.fetch import fetch, pick
from patches.engine.hashes import digest, file_digest, list_files, tree_hash
from patches.engine.project import Pins, Project, Wheel

_HEADER = "# Written by `python -m patches.engine pin`; hashes are sha256.\n"


def render(pins: Pins) -> str:
    """The text of upstream.toml."""
    lines = [_HEADER, "[upstream]", f'name = "{pins.name}"', f'version = "{pins.base}"', ""]
    lines += ["[fork]", f'version = "{pins.version}"', "", "[wheels]"]
    for tag in sorted(pins.wheels):
        wheel = pins.wheels[tag]
        lines.append(f'{tag} = {{ file = "{wheel.file}", sha256 = "{wheel.sha256}" }}')
    lines += ["", "# Every upstream file that a topic touches.", "[files]"]
    lines += [f'"{file}" = "{value}"' for file, value in sorted(pins.files.items())]
    lines += [
        "",
        "# Over all files but those that differ between the wheels of one version: extension modules",
    ]
    lines += [
        "# named after an interpreter, and *.dist-info.",
        "[composed]",
        f'sha256 = "{pins.composed}"',
        "",
    ]
    return "\n".join(lines)


def pin(project: Project, *, wheel_directory: Path | None = None, wheels: Path | None = None) -> Pins:
    """Record the hashes of this checkout in upstream.toml and return them.

    ``wheels`` also takes the wheel hashes anew, from all wheels of the base version in that directory.
    """
    pins = project.pins(merging=True)
    if wheels is not None:
        pins = replace(pins, wheels=_wheels(pins, wheels))
    topics = project.topics()
    archive = fetch(pins, pick(pins), wheel_directory)
    with zipfile.ZipFile(archive) as upstream:
        held = set(upstream.namelist())
        touched = sorted({file for topic in topics for file in topic.files} & held)
        pins = replace(pins, files={file: digest(upstream.read(file)) for file in touched})
    with tempfile.TemporaryDirectory(prefix="sglang-fork-pin-") as scratch:
        target = Path(scratch)
        stage(target, archive, pins, topics, project.overlay())
        tree = tree_hash({name: file_digest(target / name) for name in list_files(target)})
    pins = replace(pins, composed=tree)
    _write(project.pins_file, render(pins))
    return pins


def _wheels(pins: Pins, directory: Path) -> dict[str, Wheel]:
    found = {}
    for path in sorted(directory.glob(f"{pins.name}-{pins.base}-cp*-manylinux*.whl")):
        tag = path.name.split("-")[2]
        found[tag] = Wheel(tag, path.name, file_digest(path))
    if not found:
        raise UsageError(f"{directory} holds no wheel of {pins.name} {pins.base}")
    return found


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
