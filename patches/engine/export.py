"""Writes the series as git-format patches against clean upstream, and proves that they apply.

Patches are build products: they hold upstream's context lines and are never committed here. The version
stamp and the baked topic list are packaging and stay out of them; without that list ``sglang.fork`` counts
every topic as in force.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
import zipfile
from pathlib import Path

from patches.engine import page
from patches.engine.compose import PACKAGE, locked
from patches.engine.errors import EngineError
from patches.engine.fetch import fetch, pick
from patches.engine.model import Sources, Topic
from patches.engine.patcher import check_pins, patch
from patches.engine.project import Project
from patches.engine.review import Review
from patches.engine.survey import archive_sources

REST = "overlay"
_AUTHOR = "fast-verify fork <fork@invalid>"
_DATE = "2026-01-01T00:00:00+0000"
_FORMAT = ("format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--full-index", "--binary")


def export(project: Project, *, wheel_directory: Path | None = None) -> list[Path]:
    """Write ``build/export/NNNN-topic.patch`` for every topic in force, in series order.

    Beside it ``build/review/NNNN-topic.md`` says what a reviewer asks for, and ``NNNN-topic.tests.patch`` adds the topic's
    tests with the helper modules that they import. Overlay files that no topic owns come last, in a patch of their own.

    Raises:
        EngineError: a patch does not apply to clean upstream, or what it gives does not compile.
    """
    pins = project.pins()
    topics = project.topics()
    archive = fetch(pins, pick(pins), wheel_directory)
    sources = archive_sources(archive)
    check_pins(topics, sources, pins.files, pins.base)
    needed = [
        result.topic for result in patch(topics, sources, pins.base).topics if result.state == "applied"
    ]
    owned = _ownership(needed, project.overlay())
    target = project.build / "export"
    with (
        locked(project.build),
        tempfile.TemporaryDirectory(prefix=".exporting-", dir=project.build) as scratch,
    ):
        made = Path(scratch) / "patches"
        made.mkdir()
        _write_series(Path(scratch) / "tree", made, needed, owned, sources, pins.base)
        patches = sorted(made.iterdir())
        _prove(Path(scratch) / "clean", archive, patches, _expected(needed, owned, sources, pins.base))
        letters = _cover_letters(project, needed, patches, Path(scratch) / "letters", pins.base)
        for fresh, place in ((made, target), (letters, project.build / "review")):
            if place.exists():
                shutil.rmtree(place)
            os.rename(fresh, place)
    return sorted(target.iterdir())


def _cover_letters(
    project: Project, topics: list[Topic], patches: list[Path], folder: Path, base: str
) -> Path:
    """``NNNN-topic.md`` for each topic, named like its patch, and its tests."""
    folder.mkdir()
    review = Review(project)
    for topic, patch_file in zip(topics, patches, strict=False):
        text = page.cover(topic, review, base, patch_file.read_text(encoding="utf-8"))
        (folder / f"{patch_file.stem}.md").write_text(text, encoding="utf-8")
        tests = review.tests(topic)
        if tests:
            files = {
                name: review.companions.texts[name] for name in (*tests, *review.companions.helpers(tests))
            }
            (folder / f"{patch_file.stem}.tests.patch").write_bytes(_added(files, f"{topic.name}: tests\n"))
    return folder


def _added(files: dict[str, str], text: str) -> bytes:
    """A patch that adds files, proven on an empty tree."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, clean = Path(scratch) / "tree", Path(scratch) / "clean"
        for place in (tree, clean):
            place.mkdir()
            _git(place, "init", "--quiet")
        _commit(tree, "nothing\n")
        for name, content in files.items():
            _put(tree, name, content.encode())
        _commit(tree, text)
        made = _git(tree, *_FORMAT, "--subject-prefix=PATCH")
        item = Path(scratch) / "tests.patch"
        item.write_bytes(made)
        _git(clean, "apply", str(item))
        for name, content in files.items():
            if (clean / name).read_text(encoding="utf-8") != content:
                raise EngineError(f"the exported tests give another {name}")
    return made


def _ownership(topics: list[Topic], overlay: dict[str, Path]) -> dict[str, dict[str, Path]]:
    """Overlay files by the topic that names them most closely; REST holds those that none does."""
    owned: dict[str, dict[str, Path]] = {name: {} for name in (*(topic.name for topic in topics), REST)}
    for name, path in overlay.items():
        claims = [
            (len(own), topic.name)
            for topic in topics
            for own in topic.overlay
            if name == own or (own.endswith("/") and name.startswith(own))
        ]
        # Of equal claims `max` takes the first, the earliest topic's: later topics may need the file too.
        owner = max(claims, key=lambda claim: claim[0])[1] if claims else REST
        owned[owner][name] = path
    return owned


def message(topic: Topic, base: str) -> str:
    """The commit message of a topic's patch."""
    subject = f"{topic.name}: {topic.why.strip().split('. ')[0].rstrip('.')}"
    parts = [textwrap.shorten(subject, 100, placeholder=" ..."), textwrap.fill(topic.why.strip(), 76)]
    parts.append(f"Upstream: {topic.upstream}\nRetire when: {topic.retire_when}\nBase: sglang {base}")
    if topic.detect:
        parts[-1] += f"\nNot needed when: {topic.detect}"
    if topic.not_needed is not None:
        parts[-1] += f"\nLeft out once: {topic.not_needed.describe()}"
    return "\n\n".join(parts) + "\n"


def _write_series(
    tree: Path,
    made: Path,
    topics: list[Topic],
    owned: dict[str, dict[str, Path]],
    sources: Sources,
    base: str,
) -> None:
    """Commit clean upstream files, then each topic on top, and format every topic's commit."""
    tree.mkdir()
    _git(tree, "init", "--quiet")
    for file in sorted({file for topic in topics for file in topic.files}):
        _put(tree, file, sources.files[file])
    _commit(tree, f"sglang {base}")
    steps = [(topic.name, message(topic, base)) for topic in topics]
    if owned[REST]:
        steps.append((REST, f"{REST}: modules that no topic owns\n\nBase: sglang {base}\n"))
    for number, (name, text) in enumerate(steps, 1):
        for file, data in _changed(topics[:number], name, sources, base).items():
            _put(tree, file, data)
        for file, path in owned[name].items():
            _put(tree, file, path.read_bytes())
        _commit(tree, text)
        formatted = _git(tree, *_FORMAT, f"--subject-prefix=PATCH {number}/{len(steps)}")
        (made / f"{number:04d}-{name}.patch").write_bytes(formatted)


def _changed(topics: list[Topic], name: str, sources: Sources, base: str) -> dict[str, bytes]:
    """What the last of ``topics`` changes, if it is ``name``: its files, with what the earlier ones made of them."""
    files = {file for topic in topics if topic.name == name for file in topic.files}
    # Topics that share none of these files do not change them: to patch theirs again would take most of the time.
    sharing = [topic for topic in topics if files & set(topic.files)]
    return {file: data for file, data in patch(sharing, sources, base).files.items() if file in files}


def _expected(
    topics: list[Topic], owned: dict[str, dict[str, Path]], sources: Sources, base: str
) -> dict[str, bytes]:
    files = dict(patch(topics, sources, base).files)
    for group in owned.values():
        files |= {name: path.read_bytes() for name, path in group.items()}
    return files


def _prove(clean: Path, archive: Path, patches: list[Path], expected: dict[str, bytes]) -> None:
    """Apply the patches in order to a clean unpacked wheel, then compare and compile what they gave."""
    clean.mkdir()
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(clean, [name for name in wheel.namelist() if name.startswith(f"{PACKAGE}/")])
    # A repository of its own: inside a checkout, `git apply` would skip paths outside its index.
    _git(clean, "init", "--quiet")
    for item in patches:
        _git(clean, "apply", "--check", str(item.resolve()))
        _git(clean, "apply", str(item.resolve()))
    for file, data in expected.items():
        place = clean / file
        if not place.is_file() or place.read_bytes() != data:
            raise EngineError(f"exported patches give another {file} than composing does")
        if file.endswith(".py"):
            try:
                compile(data, file, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise EngineError(f"{file} does not compile after the exported patches: {error}") from error


def _put(tree: Path, file: str, data: bytes) -> None:
    place = tree / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


def _commit(tree: Path, text: str) -> None:
    _git(tree, "add", "--all", "--force")
    _git(tree, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", stdin=text)


def _git(tree: Path, *arguments: str, stdin: str | None = None) -> bytes:
    """Run git apart from the user's and the machine's settings, with a fixed author and date."""
    name, _, address = _AUTHOR.partition(" <")
    identity = {"NAME": name, "EMAIL": address.rstrip(">"), "DATE": _DATE}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {
        f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in identity.items()
    }
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    command = ["git", "-C", str(tree), *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            input=None if stdin is None else stdin.encode(),
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise EngineError("git is not installed: export needs it") from error
    if done.returncode != 0:
        raise EngineError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
