"""Composes the fork: pinned upstream + patches + overlay -> ``build/composed``.

The tree is made in a scratch directory next to the target and renamed into place with its manifest
already in it, so an interrupted build leaves either the old tree or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pprint
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patches.engine.errors import EngineError
from patches.engine.fetch import fetch, pick
from patches.engine.hashes import digest, file_digest, list_files, tree_hash
from patches.engine.model import Sources, Topic
from patches.engine.patcher import Patched, check_pins, patch
from patches.engine.project import Pins, Project, Wheel

MANIFEST = ".fork-manifest.json"
PACKAGE = "sglang"
VERSION_FILE = "sglang/_version.py"
TOPICS_FILE = "sglang/fork/_composed.py"


@dataclass(frozen=True)
class Composed:
    """A composed tree: where it is, its hash, and whether it was already there."""

    path: Path
    tree: str
    fresh: bool
    patched: Patched | None


def compose(
    project: Project, *, tag: str | None = None, wheel_directory: Path | None = None, force: bool = False
) -> Composed:
    """Bring ``build/composed`` up to date.

    Args:
        tag: interpreter tag of the wheel to use (default: the running interpreter's).
        wheel_directory: where the upstream wheel lies (default: ``SGLANG_FORK_WHEELS``, cache, pip).
        force: compose anew and discard edits made by hand in the tree.

    Raises:
        EngineError: anything that does not fit; the tree is then as it was before.
    """
    pins = project.pins()
    wheel = pick(pins, tag)
    topics = project.topics()
    overlay = project.overlay()
    inputs = _inputs(project, pins, wheel, topics, overlay)
    with locked(project.build):
        previous = read_manifest(project.composed)
        if previous is not None and not force:
            _refuse_hand_edits(project.composed, previous)
            if previous.inputs == inputs:
                return Composed(project.composed, previous.tree, False, None)
        archive = fetch(pins, wheel, wheel_directory)
        with tempfile.TemporaryDirectory(prefix=".composing-", dir=project.build) as scratch:
            staged = Path(scratch) / "tree"
            staged.mkdir()
            patched = stage(staged, archive, pins, topics, overlay)
            hashes = {name: file_digest(staged / name) for name in list_files(staged)}
            tree = tree_hash(hashes)
            if previous is not None:
                _keep_byte_code(project.composed, previous.files, staged, hashes)
            manifest = Manifest(inputs=inputs, python=wheel.tag, tree=tree, files=hashes)
            (staged / MANIFEST).write_text(
                json.dumps(vars(manifest), indent=0, sort_keys=True), encoding="utf-8"
            )
            _swap(staged, project.composed, Path(scratch) / "old")
    return Composed(project.composed, tree, True, patched)


def stage(
    target: Path,
    archive: Path,
    pins: Pins,
    topics: list[Topic],
    overlay: dict[str, Path],
    *,
    waive: bool = False,
) -> Patched:
    """Write the composed tree into the empty directory ``target``; ``waive`` skips the file hashes."""
    with zipfile.ZipFile(archive) as upstream:
        names = [
            name for name in upstream.namelist() if name.startswith(f"{PACKAGE}/") and not name.endswith("/")
        ]
        for name in names:
            upstream.extract(name, target)
            if upstream.getinfo(name).external_attr >> 16 & 0o111:  # zipfile drops it; an installer keeps it
                (target / name).chmod((target / name).stat().st_mode | 0o111)
        _write_metadata(upstream, target, pins, {PACKAGE} | {name.partition("/")[0] for name in overlay})
    sources = load_sources(target, names)
    refuse_clashes(overlay, sources, pins.base)
    if not waive:
        check_pins(topics, sources, pins.files, pins.base)
    patched = patch(topics, sources, pins.base)
    for name, data in patched.files.items():
        (target / name).write_bytes(data)
    for name, path in overlay.items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    (target / VERSION_FILE).write_text(_version_module(pins), encoding="utf-8")
    topics_file = target / TOPICS_FILE
    topics_file.parent.mkdir(parents=True, exist_ok=True)
    topics_file.write_text(_topics_module(pins, patched), encoding="utf-8")
    return patched


def load_sources(root: Path, names: list[str]) -> Sources:
    """Upstream's Python files below ``root``; other files by name only."""
    return Sources({name: (root / name).read_bytes() if name.endswith(".py") else b"" for name in names})


def refuse_clashes(overlay: dict[str, Path], sources: Sources, base: str) -> None:
    """Raises EngineError if an overlay path is one that upstream has, or that composing writes."""
    folders = {
        "/".join(name.split("/")[:depth]) for name in sources.files for depth in range(1, name.count("/") + 1)
    }
    for name, path in overlay.items():
        parents = ["/".join(name.split("/")[:depth]) for depth in range(1, name.count("/") + 1)]
        if sources.has(name) or name in folders or any(sources.has(parent) for parent in parents):
            raise EngineError(
                f"overlay file {path} has the path {name}, which sglang {base} already has; "
                "give ours another name, and change upstream's file through a topic"
            )
        shadowed = _same_module(name, parents, sources, folders)
        if shadowed is not None:
            # Two paths, one import name: Python takes the package, and one of the two is never imported.
            raise EngineError(
                f"overlay file {path} has the import name of {shadowed}, which sglang {base} already has; "
                "give ours another name, and change upstream's file through a topic"
            )
        if name == TOPICS_FILE:
            raise EngineError(f"overlay file {path} has the path of a generated file; remove it")


def _same_module(name: str, parents: list[str], sources: Sources, folders: set[str]) -> str | None:
    """Upstream's path that is imported by the same name as the overlay file ``name`` or a package above it."""
    for parent in parents:
        if sources.has(f"{parent}.py"):
            return f"{parent}.py"
    stem = name.removesuffix(".py")
    return f"{stem}/" if stem != name and stem in folders else None


@dataclass(frozen=True)
class Manifest:
    """What a composed tree says of itself: its inputs, the wheel's tag, its hash, each file's hash."""

    inputs: str
    python: str
    tree: str
    files: dict[str, str]


def read_manifest(tree: Path) -> Manifest | None:
    """The manifest of a complete tree; None for a missing, partial or foreign one."""
    try:
        return Manifest(**json.loads((tree / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def hand_edits(tree: Path, files: dict[str, str]) -> list[str]:
    """Files of the tree that were changed, removed or added since it was composed."""
    present = set(list_files(tree)) - {MANIFEST}
    changed = [name for name in files if name not in present or file_digest(tree / name) != files[name]]
    return sorted([*changed, *(present - set(files))])


def _refuse_hand_edits(tree: Path, manifest: Manifest) -> None:
    changed = hand_edits(tree, manifest.files)
    if not changed:
        return
    shown = "\n".join(f"  {name}" for name in changed[:10])
    more = f"\n  and {len(changed) - 10} more" if len(changed) > 10 else ""
    raise EngineError(
        f"{tree} was edited by hand; composing would lose these changes:\n{shown}{more}\n"
        "move them into python/ or a topic, then discard them with `python -m patches.engine compose --force`"
    )


def _inputs(project: Project, pins: Pins, wheel: Wheel, topics: list[Topic], overlay: dict[str, Path]) -> str:
    """One hash over all that the composed tree is made from."""
    parts = [pins.base, pins.version, wheel.tag, wheel.sha256, *(topic.name for topic in topics)]
    for folder in ("engine", "topics"):
        for path in sorted((project.root / "patches" / folder).glob("*.py")):
            parts.append(f"{folder}/{path.name}:{file_digest(path)}")
    parts += [f"{file}:{value}" for file, value in sorted(pins.files.items())]
    parts += [f"{name}:{file_digest(path)}" for name, path in sorted(overlay.items())]
    return digest("\n".join(parts).encode())


@contextlib.contextmanager
def locked(build: Path) -> Iterator[None]:
    """Hold the build folder; scratch directories that a killed build left behind are removed."""
    try:
        build.mkdir(parents=True, exist_ok=True)
        lock = (build / ".lock").open("w")
    except OSError as error:
        raise EngineError(
            f"the build folder {build} cannot be written ({error.strerror}); make it writable or remove it"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for left in (*build.glob(".composing-*"), *build.glob(".exporting-*")):
                shutil.rmtree(left, ignore_errors=True)
            yield
        except OSError as error:
            raise EngineError(f"writing in {build} failed: {error}; nothing was changed") from error


def _swap(staged: Path, target: Path, old: Path) -> None:
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(staged, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise


def _keep_byte_code(old: Path, old_hashes: dict[str, str], new: Path, hashes: dict[str, str]) -> None:
    """Carry time stamps and byte code of unchanged files over from the previous tree.

    Importing the package compiles hundreds of modules; a small edit should not cost that again. Byte code
    is trusted by its source's time stamp and size, hence only files with equal hashes keep theirs.
    """
    folders: dict[Path, dict[str, list[Path]]] = {}
    for name, value in hashes.items():
        if not name.endswith(".py") or old_hashes.get(name) != value:
            continue
        source = old / name
        try:
            stamp = source.stat()
        except OSError:
            continue
        os.utime(new / name, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        cache = source.parent / "__pycache__"
        if cache not in folders:
            stems: dict[str, list[Path]] = {}
            for path in cache.glob("*.pyc") if cache.is_dir() else ():
                stems.setdefault(path.name.split(".", 1)[0], []).append(path)
            folders[cache] = stems
        for path in folders[cache].get(source.stem, ()):
            kept = (new / name).parent / "__pycache__" / path.name
            kept.parent.mkdir(exist_ok=True)
            # A hard link, not a move: the old tree must stay whole until the new one is in place.
            os.link(path, kept)


def _write_metadata(upstream: zipfile.ZipFile, target: Path, pins: Pins, packages: set[str]) -> None:
    """Upstream's metadata under the fork's version, so that ``importlib.metadata`` sees the tree."""
    source = f"{pins.name}-{pins.base}.dist-info"
    place = target / f"{pins.name}-{pins.version}.dist-info"
    place.mkdir()
    for name in ("METADATA", "entry_points.txt", "WHEEL"):
        text = upstream.read(f"{source}/{name}").decode("utf-8")
        if name == "METADATA":
            text = fork_metadata(text, pins)
        (place / name).write_text(text, encoding="utf-8")
    (place / "top_level.txt").write_text("".join(f"{name}\n" for name in sorted(packages)), encoding="utf-8")


def fork_metadata(text: str, pins: Pins) -> str:
    """Upstream's METADATA with the fork's version."""
    wanted = f"\nVersion: {pins.base}\n"
    if text.count(wanted) != 1:
        raise EngineError(f"METADATA of sglang {pins.base} does not state that version once")
    return text.replace(wanted, f"\nVersion: {pins.version}\n")


def _version_module(pins: Pins) -> str:
    public, _, local = pins.version.partition("+")
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in public.split(".")]
    if local:
        parts.append(local)
    return (
        '"""Version of the fork, written by composing."""\n\n'
        f"__version__ = version = {pins.version!r}\n"
        f"__version_tuple__ = version_tuple = {tuple(parts)!r}\n"
        "__commit_id__ = commit_id = None\n"
    )


def _topics_module(pins: Pins, patched: Patched) -> str:
    manifest = {
        "base": pins.base,
        "version": pins.version,
        "topics": [
            {
                "name": result.topic.name,
                "state": result.state,
                "reason": result.reason,
                "why": result.topic.why,
                "upstream": result.topic.upstream,
                "retire_when": result.topic.retire_when,
                "files": list(result.topic.files),
            }
            for result in patched.topics
        ],
    }
    text = pprint.pformat(manifest, width=110, sort_dicts=False)
    return f'"""Topics of this build, written by composing."""\n\nMANIFEST = {text}\n'
