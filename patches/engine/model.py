"""A topic: one reason to change upstream, with the edits that do it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from patches.engine.edits import Edit
from patches.engine.tree import Place, definitions, mentions

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Sources:
    """Read access to pristine upstream files, parsed at most once each."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self._parsed: dict[str, cst.Module] = {}

    def has(self, file: str) -> bool:
        """Whether upstream has this path."""
        return file in self.files

    def module(self, file: str) -> cst.Module:
        """The parsed file."""
        if file not in self._parsed:
            self._parsed[file] = cst.parse_module(self.files[file])
        return self._parsed[file]


@dataclass(frozen=True)
class NameExists:
    """Not needed once upstream defines the function or class ``name`` in ``file``."""

    file: str
    name: str

    def reason(self, sources: Sources) -> str | None:
        """Why the topic is not needed, or None while it is."""
        if not sources.has(self.file):
            return None
        if any(name == self.name for name, _ in definitions(Place(sources.module(self.file), ()))):
            return f"upstream defines {self.name} in {self.file}"
        return None

    def describe(self) -> str:
        """The condition in words."""
        return f"{self.file} defines {self.name}"


@dataclass(frozen=True)
class Mentions:
    """Not needed once the function or class ``scope`` in ``file`` mentions ``name``."""

    file: str
    scope: str
    name: str

    def reason(self, sources: Sources) -> str | None:
        """Why the topic is not needed, or None while it is."""
        if not sources.has(self.file):
            return None
        for name, place in definitions(Place(sources.module(self.file), ())):
            if name == self.scope and mentions(place.node, self.name):
                return f"upstream's {self.scope} in {self.file} uses {self.name}"
        return None

    def describe(self) -> str:
        """The condition in words."""
        return f"{self.scope} in {self.file} mentions {self.name}"


@dataclass(frozen=True)
class FileExists:
    """Not needed once upstream has ``file``."""

    file: str

    def reason(self, sources: Sources) -> str | None:
        """Why the topic is not needed, or None while it is."""
        return f"upstream has {self.file}" if sources.has(self.file) else None

    def describe(self) -> str:
        """The condition in words."""
        return f"{self.file} exists"


Detector = NameExists | Mentions | FileExists


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One reason to change upstream.

    ``overlay`` lists files of ``python/`` that belong to the topic (paths such as ``sglang/fork/``, a
    directory ends in a slash); they become new files of its exported patch. ``stacks_on`` names earlier
    topics whose anchors this one may share. ``detect`` says how a person finds out that the topic is not
    needed any more; ``not_needed`` lets composing find out where names in upstream's files show it.
    """

    name: str
    why: str
    upstream: str
    retire_when: str
    edits: tuple[Edit, ...]
    detect: str = ""
    not_needed: Detector | None = None
    overlay: tuple[str, ...] = ()
    stacks_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"topic name {self.name!r}: use lower-case words joined by hyphens")
        for field in ("why", "upstream", "retire_when"):
            if not getattr(self, field).strip():
                raise ValueError(f"topic {self.name!r}: {field} is empty")

    @property
    def files(self) -> tuple[str, ...]:
        """Upstream files that the topic touches, sorted."""
        return tuple(sorted({edit.file for edit in self.edits}))
