"""A small checkout of a make-believe upstream, for tests that would be slow or impossible on the real one."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from patches.engine.cli import main
from patches.engine.fetch import running_tag
from patches.engine.hashes import digest, file_digest, list_files

REPOSITORY = Path(__file__).resolve().parents[2]
TAG = running_tag()

METADATA = "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\nRequires-Dist: torch==2.11.0\n"

# A function of every shape that an edit can stand at.
ENGINE = '''"""Make-believe engine."""

from __future__ import annotations

LIMITS = ["low"]


class Engine:
    """Does sums."""

    scale: int = 2

    def run(self, value):
        # upstream's own remark
        total = self.step(value, factor=3)  # keep me
        if total > 10:
            return "big"
        return total

    def step(self, value, factor):
        return value * factor

    @staticmethod
    def double(value):
        return 2 * value


def outer(flag):
    def inner():
        return flag

    if flag:
        first = inner()
        return first
    return None


async def slow(value):
    return value
'''

UPSTREAM = {
    "sglang/__init__.py": "from sglang.version import __version__\n",
    "sglang/version.py": "from sglang._version import __version__\n",
    "sglang/_version.py": "__version__ = '1.0'\n",
    "sglang/srt/engine.py": ENGINE,
    "sglang/srt/table.json": "{}\n",
}

TOPIC = """
from patches.engine import *

TOPIC = Topic(
    name={name!r}, why="Because the test says so.", upstream="none", retire_when="the test ends", detect="never",
    edits=({edits}), {more}
)
"""


@dataclass
class Checkout:
    """Builds the checkout below ``root``; change the dictionaries, then ``write``."""

    root: Path
    upstream: dict[str, str] = field(default_factory=lambda: dict(UPSTREAM))
    topics: dict[str, str] = field(default_factory=dict)
    overlay: dict[str, str] = field(default_factory=dict)
    base: str = "1.0"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def composed(self) -> Path:
        return self.root / "build" / "composed"

    def topic(self, name: str, edits: str, more: str = "") -> Checkout:
        """Add a topic whose edits are given as source text, each ending in a comma."""
        self.topics[name] = TOPIC.format(name=name, edits=edits, more=more)
        return self

    def wheel(self, tag: str = TAG, version: str | None = None) -> Path:
        """Write the make-believe upstream's wheel for an interpreter tag."""
        version = version or self.base
        self.wheels.mkdir(parents=True, exist_ok=True)
        path = self.wheels / f"sglang-{version}-{tag}-{tag}-manylinux_2_34_x86_64.whl"
        info = f"sglang-{version}.dist-info"
        extra = {f"sglang/srt/_core.cpython-{tag[2:]}-x86_64-linux-gnu.so": f"machine code for {tag}"}
        extra |= {
            f"{info}/METADATA": METADATA.replace("1.0", version),
            f"{info}/WHEEL": "Wheel-Version: 1.0\n",
        }
        extra |= {f"{info}/entry_points.txt": "[console_scripts]\nsglang = sglang.cli.main:main\n"}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in sorted((self.upstream | extra).items()):
                archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text)
        return path

    def put(self, files: dict[str, str]) -> None:
        """Write files by their path in the checkout."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def write(self, *tags: str, pin: bool = True) -> Checkout:
        """Write everything, and pin the hashes."""
        for folder in ("patches/topics", "python"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
            (self.root / folder).mkdir(parents=True)
        shutil.copytree(
            REPOSITORY / "python" / "sglang" / "fork",
            self.root / "python" / "sglang" / "fork",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for name, text in self.topics.items():
            (self.root / "patches" / "topics" / f"{name.replace('-', '_')}.py").write_text(text)
        (self.root / "patches" / "series").write_text("".join(f"{name}\n" for name in self.topics))
        self.put({f"python/{name}": text for name, text in self.overlay.items()})
        lines = [
            "[upstream]",
            'name = "sglang"',
            f'version = "{self.base}"',
            "[fork]",
            'version = "1.0+verify.9"',
        ]
        lines.append("[wheels]")
        for tag in tags or (TAG,):
            path = self.wheel(tag)
            lines.append(f'{tag} = {{ file = "{path.name}", sha256 = "{file_digest(path)}" }}')
        lines.append("[files]")
        touched = {
            name: digest(text.encode()) for name, text in self.upstream.items() if name.endswith(".py")
        }
        if pin:
            lines += [f'"{name}" = "{value}"' for name, value in touched.items()]
        (self.root / "upstream.toml").write_text("\n".join(lines) + "\n")
        return self

    def engine(self, command: str, *arguments: str) -> int:
        """Run the engine on this checkout in this process; the exit status."""
        wheels = [] if command == "forward" else ["--wheel-dir", str(self.wheels)]
        return main(["--root", str(self.root), command, *wheels, *arguments])

    def python(
        self, code: str, *, disable: str = "", flags: tuple[str, ...] = ("-c",)
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` on the composed tree in a process of its own."""
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "PYTHON"))
        }
        environment |= {"PYTHONPATH": str(self.composed), "SGLANG_FORK_DISABLE": disable}
        # -P (3.11) would keep the working directory off the path; an empty one does as well on 3.10.
        return subprocess.run(
            [sys.executable, "-S", *flags, code],
            env=environment,
            cwd=self.wheels,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def files(self) -> dict[str, str]:
        """Hash of each file of the composed tree."""
        return {name: file_digest(self.composed / name) for name in list_files(self.composed)}


def fingerprint(files: dict[str, str]) -> str:
    """A short text that changes with any of the files."""
    joined = "\n".join(f"{name} {value}" for name, value in sorted(files.items()))
    return base64.b16encode(hashlib.sha256(joined.encode()).digest()).decode()
