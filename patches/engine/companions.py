"""Which test files go with a topic, and the helper modules of the test tree that these import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from patches.engine.model import Topic


class Companions:
    """The test tree of a project, read once. Paths are relative to the project's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tests: dict[str, list[str]] = {}
        self._beside: dict[str, set[str]] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """Every Python file below ``test/``."""
        return {
            path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted((self.root / "test").rglob("*.py"))
        }

    def tests(self, topic: Topic, topics: Iterable[Topic]) -> list[str]:
        """Test files that name the topic, import a module that comes with it, or import what its edits call.

        Args:
            topic: the topic asked about.
            topics: all topics; what edits of several of them call belongs to none.
        """
        if topic.name not in self._tests:
            pattern = re.compile("|".join(_wanted(topic, topics)))
            self._tests[topic.name] = [
                name
                for name, text in self.texts.items()
                if Path(name).name.startswith("test_") and pattern.search(text)
            ]
        return self._tests[topic.name]

    def helpers(self, tests: Iterable[str]) -> list[str]:
        """Helper modules that the tests import or run by file name, directly or through another, and their conftests."""
        found: set[str] = set()
        wave = list(tests)
        while wave:
            name = wave.pop()
            if name not in self._beside:
                self._beside[name] = _imported(name, self.texts) | _conftests(name, self.texts)
            for other in self._beside[name]:
                if other not in found:
                    found.add(other)
                    wave.append(other)
        return sorted(found - set(tests))


def _wanted(topic: Topic, topics: Iterable[Topic]) -> list[str]:
    packages = [
        own.rstrip("/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for own in topic.overlay
    ]
    called, others = _called(topic), set[str]()
    for other in topics:
        others |= _called(other) if other.name != topic.name else set()
    # A module, or a package, that several topics call says nothing about one of them.
    packages += sorted(called - others)
    packages += sorted(
        {module.rpartition(".")[0] for module in called} - {module.rpartition(".")[0] for module in others}
    )
    wanted = [rf"[\"'](?:[\w,-]+,)?{re.escape(topic.name)}(?:,[\w,-]+)?[\"']"]
    wanted += [rf"\b{re.escape(name)}\b" for name in packages]
    # `from package import module` of a module that a topic owns alone.
    wanted += [
        rf"\bfrom {re.escape(name.rpartition('.')[0])} import [^\n]*\b{re.escape(name.rpartition('.')[2])}\b"
        for name in packages
        if "." in name
    ]
    return wanted


def _called(topic: Topic) -> set[str]:
    """Modules of ours that a topic's edits call."""
    hooks = (str(getattr(edit, "hook", "") or "") for edit in topic.edits)
    return {hook.partition(":")[0] for hook in hooks if ":" in hook}


def _imported(name: str, texts: Mapping[str, str]) -> set[str]:
    text = texts[name]
    words: set[str] = set(re.findall(r"\b([a-z_]+)\.py\b", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            words |= {part for alias in node.names for part in alias.name.split(".")}
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("sglang", "torch")):
            words |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {found for word in words if (found := _nearest(name, word, texts)) is not None}


def _nearest(name: str, word: str, texts: Mapping[str, str]) -> str | None:
    """The helper of that module name which shares most of its path with ``name``."""
    same = [
        other
        for other in texts
        if Path(other).stem == word and not word.startswith(("test_", "__", "conftest"))
    ]
    return max(same, key=lambda other: _shared(name, other), default=None)


def _shared(one: str, other: str) -> int:
    pairs = zip(Path(one).parts, Path(other).parts, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), 0)


def _conftests(name: str, texts: Mapping[str, str]) -> set[str]:
    folders = Path(name).parents
    places = {(folder / file).as_posix() for folder in folders for file in ("conftest.py", "__init__.py")}
    return places & set(texts)
