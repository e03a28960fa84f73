"""``pip wheel .`` on a copy of this repository: upstream's metadata, tags and extension modules, our version."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from checkout import REPOSITORY

from patches.engine.project import Project

# Told by their metadata: setuptools' hook takes a mere `find_spec("pip")` for pip at work, and gives this process Python's
# own distutils from then on. A later `import setuptools` (torch's, in another test) then ends in an assertion.
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
pytestmark = pytest.mark.skipif(not {"pip", "setuptools"} <= INSTALLED, reason="needs pip and setuptools")

NEEDED = (
    "LICENSE",
    "NOTICE",
    "MANIFEST.in",
    "pyproject.toml",
    "setup.py",
    "upstream.toml",
    "patches",
    "python",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what a build needs, so that a build here does not disturb the checkout."""
    target = tmp_path / "source"
    target.mkdir()
    for name in (*NEEDED, "sgl-kernel", "requirements", "Makefile"):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.exists():
            shutil.copyfile(source, target / name)
    return target


def pip(copy: Path, wheels: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip in the copy without a network: what it builds with is what is installed here."""
    environment = {**os.environ, "SGLANG_FORK_WHEELS": str(wheels), "PIP_NO_INDEX": "1", "PYTHONPATH": ""}
    environment["SGLANG_FORK_PREBUILD"] = "0"  # the kernels have tests of their own
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-build-isolation"]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900)


def metadata(archive: Path) -> dict[str, list[str]]:
    """All fields of a wheel's METADATA, the body as ``""``."""
    with zipfile.ZipFile(archive) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(wheel.read(name).decode())
    fields = {key: [str(value) for value in message.get_all(key) or []] for key in message}
    return fields | {"": [str(message.get_payload())]}


def test_wheel(copy: Path, archive: Path, tmp_path: Path) -> None:
    done = pip(copy, archive.parent, "wheel", "--wheel-dir", str(tmp_path / "out"), ".")
    assert done.returncode == 0, done.stdout + done.stderr
    pins = Project(copy).pins()
    (made,) = (tmp_path / "out").iterdir()
    assert made.name == archive.name.replace(pins.base, pins.version)
    ours, stock = metadata(made), metadata(archive)
    assert ours.pop("Version") == [pins.version] and stock.pop("Version") == [pins.base]
    assert ours == stock
    with zipfile.ZipFile(made) as wheel, zipfile.ZipFile(archive) as upstream:
        assert wheel.testzip() is None
        names, before = set(wheel.namelist()), set(upstream.namelist())
        changed = {file for topic in Project(copy).topics() for file in topic.files} | {"sglang/_version.py"}
        for name in before:
            if name.startswith("sglang/") and not name.endswith("/"):
                assert (wheel.read(name) == upstream.read(name)) == (name not in changed), name
        assert set(Project(copy).overlay()) <= names
        info = f"{pins.name}-{pins.version}.dist-info"
        entry_points = f"{pins.name}-{pins.base}.dist-info/entry_points.txt"
        assert wheel.read(f"{info}/entry_points.txt") == upstream.read(entry_points)
        assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= names
        packages = {name.partition("/")[0] for name in Project(copy).overlay()}
        assert set(wheel.read(f"{info}/top_level.txt").decode().split()) == packages
        folders = {name.partition("/")[0] for name in names}
        assert folders == packages | {info}


def test_source_distribution(copy: Path, tmp_path: Path) -> None:
    """It holds the recipe and not the composed tree, and needs no wheel."""
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "upstream.toml",
        "setup.py",
        "patches/series",
        "python/sglang/fork/__init__.py",
        "NOTICE",
    } <= names
    assert not any("composed/" in name for name in names)


def test_a_build_that_cannot_get_the_wheel(copy: Path, tmp_path: Path) -> None:
    """pip shows the engine's one message."""
    empty = tmp_path / "empty"
    empty.mkdir()
    done = pip(copy, empty, "wheel", "--wheel-dir", str(tmp_path / "out"), ".")
    assert done.returncode == 1
    text = done.stdout + done.stderr
    assert f"error: {empty} does not hold sglang-" in text and "Traceback" not in text
    assert not (copy / "build" / "composed").exists() and not list((tmp_path).glob("out/*"))
