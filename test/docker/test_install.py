"""``docker/install-fork`` in scratch environments: with small stand-in wheels, and with the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from patches.engine.fetch import fetch, pick
from patches.engine.project import Project

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker" / "install-fork"


def wheel(folder: Path, name: str, version: str, requires: str = "") -> Path:
    """A wheel of one module that knows its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


class Scratch:
    """A virtual environment with pip and nothing else."""

    def __init__(self, place: Path) -> None:
        self.python = place / "bin" / "python"

    def pip(self, *arguments: str) -> None:
        """Run pip without an index."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--no-index", *arguments]
        subprocess.run(command, check=True, timeout=900, env=clean())

    def packages(self) -> set[str]:
        """name==version of everything installed."""
        command = [str(self.python), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=clean())
        return set(done.stdout.split())

    def install(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the script under test."""
        return subprocess.run(
            [str(SCRIPT), *arguments],
            env=clean() | {"PYTHON": str(self.python)},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


def clean() -> dict[str, str]:
    """The environment without what would let another Python or another sglang in."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment, to be copied."""
    place = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=600)
    return place


@pytest.fixture
def scratch(empty: Path, tmp_path: Path) -> Scratch:
    """An environment of the test's own; its interpreter finds its packages by where it lies."""
    return Scratch(Path(shutil.copytree(empty, tmp_path / "venv", symlinks=True)))


def test_only_sglang_changes(scratch: Scratch, tmp_path: Path) -> None:
    """The fork asks for a newer dependency, which is not touched."""
    made = tmp_path / "wheels"
    scratch.pip("--no-deps", str(wheel(made, "sglang", "1.0")), str(wheel(made, "dependency", "1.0")))
    before = scratch.packages()
    fork = wheel(made, "sglang", "1.0+verify.7", requires="dependency>=2")
    done = scratch.install(str(fork))
    assert done.returncode == 0, done.stderr
    assert "sglang 1.0 -> 1.0+verify.7" in done.stdout
    assert scratch.packages() ^ before == {"sglang==1.0", "sglang==1.0+verify.7"}


def test_a_base_from_a_source_tree_is_replaced(scratch: Scratch, tmp_path: Path) -> None:
    """The official image has sglang as an editable install beside the working directory."""
    tree = tmp_path / "workspace" / "sglang" / "python"
    wheel(tmp_path / "unpacked", "sglang", "1.0+g29481685")
    (tree / "sglang").mkdir(parents=True)
    (tree / "sglang" / "__init__.py").write_text("VERSION = 'tree'\n")
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    info = site / "sglang-1.0+g29481685.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 1.0+g29481685\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "direct_url.json").write_text(f'{{"dir_info": {{"editable": true}}, "url": "file://{tree}"}}')
    pointer = site / "__editable__.sglang-1.0.pth"
    pointer.write_text(f"{tree}\n")
    names = [pointer.name, *(f"{info.name}/{item.name}" for item in info.iterdir()), f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    fork = wheel(tmp_path / "wheels", "sglang", "1.0+verify.7")
    done = scratch.install(str(fork), cwd=tree.parents[1])
    assert done.returncode == 0, done.stderr
    assert not pointer.exists()


Prepare = Callable[[Scratch, Path], list[str]]


def other_base(scratch: Scratch, made: Path) -> list[str]:
    scratch.pip("--no-deps", str(wheel(made, "sglang", "0.9")))
    return [str(wheel(made, "sglang", "1.0+verify.7"))]


def no_base(scratch: Scratch, made: Path) -> list[str]:
    return [str(wheel(made, "sglang", "1.0+verify.7"))]


def base_where_none_is_expected(scratch: Scratch, made: Path) -> list[str]:
    scratch.pip("--no-deps", str(wheel(made, "sglang", "1.0")))
    return ["--fresh", str(wheel(made, "sglang", "1.0+verify.7"))]


def not_the_fork(scratch: Scratch, made: Path) -> list[str]:
    return ["--fresh", str(wheel(made, "sglang", "1.0"))]


def no_wheel(scratch: Scratch, made: Path) -> list[str]:
    return ["missing.whl"]


def shadowed(scratch: Scratch, made: Path) -> list[str]:
    """Something before site-packages on the path answers to the name."""
    site = next((scratch.python.parents[1] / "lib").glob("python*/site-packages"))
    (made / "shadow" / "sglang").mkdir(parents=True)
    (made / "shadow" / "sglang" / "__init__.py").write_text("")
    (site / "shadow.pth").write_text(f"import sys; sys.path.insert(0, {str(made / 'shadow')!r})\n")
    return ["--fresh", str(wheel(made, "sglang", "1.0+verify.7"))]


REFUSED: tuple[tuple[Prepare, str], ...] = (
    (other_base, "must be sglang 1.0, but 0.9 is installed"),
    (no_base, "but no sglang is installed"),
    (base_where_none_is_expected, "leave out --fresh"),
    (not_the_fork, "is not a wheel of the fork"),
    (no_wheel, "give one wheel"),
    (shadowed, "which is not the installed package"),
)


@pytest.mark.parametrize(("prepare", "says"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(prepare: Prepare, says: str, scratch: Scratch, tmp_path: Path) -> None:
    done = scratch.install(*prepare(scratch, tmp_path / "wheels"))
    assert done.returncode == 1
    assert says in done.stderr


@pytest.fixture(scope="module")
def fork_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fork's wheel, made as the image makes it."""
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
    ]
    subprocess.run([*command, str(out), str(ROOT)], check=True, timeout=600, env=clean())
    (made,) = out.glob("sglang-*.whl")
    return made


@pytest.mark.slow
def test_the_real_wheel_over_the_real_base(scratch: Scratch, fork_wheel: Path) -> None:
    """The steps of docker/Dockerfile: upstream's wheel, some of its dependencies, then the fork."""
    pins = Project(ROOT).pins()
    scratch.pip("--no-deps", str(fetch(pins, pick(pins))))
    before = scratch.packages()
    done = scratch.install(str(fork_wheel))
    assert done.returncode == 0, done.stderr
    changed = scratch.packages() ^ before
    assert {item.partition("==")[0] for item in changed} == {"sglang"} and len(changed) == 2
    command = [str(scratch.python), "-m", "sglang.fork"]
    report = subprocess.run(
        command, capture_output=True, text=True, env=clean(), cwd="/", timeout=600, check=False
    )
    assert report.returncode == 0 and "verify-attention" in report.stdout, report.stderr
    # Byte code is there, since a container with a read-only root cannot write it.
    site = next((scratch.python.parents[1] / "lib").glob("python*/site-packages/sglang/fork/__pycache__"))
    assert list(site.glob("*.pyc"))
