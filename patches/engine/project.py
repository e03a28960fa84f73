"""The repository as the engine sees it: upstream.toml, the series of topics, and the overlay."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patches.engine.errors import EngineError, UsageError
from patches.engine.model import Topic

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

IGNORED_NAMES = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".DS_Store"}


_CONFLICT = re.compile(
    r"^<<<<<<< .*?\n(.*?)^(?:\|\|\|\|\|\|\| .*?)?=======\n.*?^>>>>>>> [^\n]*\n", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Wheel:
    """One pinned upstream wheel."""

    tag: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Pins:
    """What upstream.toml pins."""

    name: str
    base: str
    version: str
    wheels: dict[str, Wheel]
    files: dict[str, str] = field(default_factory=dict)
    composed: str = ""


@dataclass(frozen=True)
class Project:
    """Paths of one checkout."""

    root: Path

    @property
    def pins_file(self) -> Path:
        return self.root / "upstream.toml"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def composed(self) -> Path:
        return self.build / "composed"

    @property
    def overlays(self) -> tuple[tuple[Path, str], ...]:
        """Directories whose contents are laid over the upstream tree, and below which path of it.

        The sources of kernels that may be compiled on first use go beside the package that compiles them.
        """
        return (
            (self.root / "python", ""),
            (self.root / "sgl-kernel" / "python", ""),
            (self.root / "sgl-kernel" / "csrc" / "all_reduce", "sglang/srt/distributed/one_shot/csrc/"),
        )

    def pins(self, *, merging: bool = False) -> Pins:
        """Read upstream.toml; ``merging`` takes our side of merge conflicts, for hashes about to be renewed.

        Raises:
            UsageError: the file is missing or malformed.
        """
        try:
            text = self.pins_file.read_text(encoding="utf-8")
            if "\n<<<<<<< " in text:
                if not merging:
                    raise UsageError(
                        f"{self.pins_file} holds merge conflicts: renew the hashes with `python -m patches.engine pin`"
                    )
                text = _CONFLICT.sub(r"\1", text)
            data = tomllib.loads(text)
            upstream = data["upstream"]
            wheels = {
                tag: Wheel(tag, entry["file"], entry["sha256"]) for tag, entry in data["wheels"].items()
            }
            pins = Pins(
                name=upstream["name"],
                base=upstream["version"],
                version=data["fork"]["version"],
                wheels=wheels,
                files=dict(data.get("files", {})),
                composed=data.get("composed", {}).get("sha256", ""),
            )
            texts = [pins.name, pins.base, pins.version, pins.composed, *pins.files.values()]
            texts += [text for wheel in wheels.values() for text in (wheel.file, wheel.sha256)]
            for value in texts:
                if not isinstance(value, str):
                    raise TypeError(f"{value!r} stands where a text is wanted")
            return pins
        except FileNotFoundError as error:
            raise UsageError(f"{self.pins_file} is missing: run this in a checkout of the fork") from error
        except OSError as error:
            raise EngineError(f"{self.pins_file} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.pins_file} is malformed: it is not UTF-8 text") from error
        except (KeyError, tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
            raise UsageError(f"{self.pins_file} is malformed: {error!r}") from error

    def series(self) -> list[str]:
        """Topic names in the order they apply."""
        path = self.root / "patches" / "series"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError as error:
            raise UsageError(f"{path} is missing: it lists the topics in order") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is malformed: it is not UTF-8 text") from error
        names = [line.partition("#")[0].strip() for line in lines]
        names = [name for name in names if name]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UsageError(f"{path} lists a topic twice: {', '.join(repeated)}")
        return names

    def topics(self) -> list[Topic]:
        """Load every topic of the series.

        Raises:
            UsageError: a topic file is missing, broken, misnamed, or not in the series.
        """
        folder = self.root / "patches" / "topics"
        names = self.series()
        on_disk = {path.stem.replace("_", "-") for path in folder.glob("*.py") if path.stem != "__init__"}
        for name in names:
            if name not in on_disk:
                near = difflib.get_close_matches(name, sorted(on_disk), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UsageError(f"patches/series names {name!r}, but {_topic_file(name)} is missing{hint}")
        unlisted = sorted(on_disk - set(names))
        if unlisted:
            raise UsageError(
                f"topic {unlisted[0]!r} has a file but is not in patches/series: add it or remove the file"
            )
        topics = [_load(folder / _topic_file(name), name) for name in names]
        for index, topic in enumerate(topics):
            for below in topic.stacks_on:
                if below not in names[:index]:
                    raise UsageError(
                        f"topic {topic.name!r} stacks on {below!r}, which is not earlier in the series"
                    )
        return topics

    def overlay(self) -> dict[str, Path]:
        """Our files by their path in the composed tree.

        Raises:
            EngineError: two overlay directories hold the same path.
        """
        found: dict[str, Path] = {}
        for top, prefix in self.overlays:
            if not top.is_dir():
                continue
            for path in sorted(top.rglob("*")):
                relative = path.relative_to(top)
                if not path.is_file() or IGNORED_NAMES & set(relative.parts):
                    continue
                if path.suffix in {".pyc", ".pyo"} or any(
                    part.endswith(".egg-info") for part in relative.parts
                ):
                    continue
                name = prefix + relative.as_posix()
                if name in found:
                    raise EngineError(f"overlay path {name} exists twice: {found[name]} and {path}")
                found[name] = path
        return found


def _topic_file(name: str) -> str:
    return f"{name.replace('-', '_')}.py"


def _load(path: Path, name: str) -> Topic:
    spec = importlib.util.spec_from_file_location(f"_fork_topic_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error
    topic: Any = getattr(module, "TOPIC", None)
    if not isinstance(topic, Topic):
        raise UsageError(f"{path} defines no TOPIC")
    if topic.name != name:
        raise UsageError(f"{path}: TOPIC.name is {topic.name!r}, the file name says {name!r}")
    return topic


def find_root(start: Path | None = None) -> Path:
    """The checkout that this engine belongs to."""
    return start or Path(__file__).resolve().parents[2]
