"""What goes with a topic's diff: threads it answers, rows, tests, its state on a newer upstream, the next step.

``patches/review.toml`` holds what only a person knows, ``patches/forward.toml`` what the last look forward found.
Tests are found by reading them, so a new topic is listed with all it brings before anybody writes an entry.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from patches.engine.companions import Companions
from patches.engine.errors import EngineError
from patches.engine.model import Topic
from patches.engine.project import Project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

APPLIES = "applies"
NOT_NEEDED = "not needed"
UNTRIED = "not tried"
LOST = "lost"

REPOSITORIES = {"sglang": "sgl-project/sglang", "vllm": "vllm-project/vllm"}
_URL = re.compile(r"https://github\.com/(sgl-project/sglang|vllm-project/vllm)/(?:issues|pull)/(\d+)")
_THREAD = re.compile(r"(sglang|vllm)#(\d+)")


@dataclass(frozen=True)
class Thread:
    """A public issue or pull request; ``state`` and ``says`` are empty where nobody recorded them."""

    project: str
    number: int
    kind: str = ""
    state: str = ""
    says: str = ""

    @property
    def name(self) -> str:
        """``sglang#123``."""
        return f"{self.project}#{self.number}"

    @property
    def url(self) -> str:
        """Where it is read. GitHub forwards an issue's address to the pull request of that number and back."""
        place = "pull" if self.kind == "pull" else "issues"
        return f"https://github.com/{REPOSITORIES[self.project]}/{place}/{self.number}"


@dataclass(frozen=True)
class Review:
    """Everything about all topics of a project that is not in their diffs."""

    project: Project

    @cached_property
    def _notes(self) -> Mapping[str, Any]:
        return _read(self.project.root / "patches" / "review.toml")

    @cached_property
    def forward(self) -> Mapping[str, Any]:
        """``version`` and ``topics`` of the recorded look forward; empty where none is recorded."""
        return _read(forward_file(self.project))

    @property
    def as_of(self) -> str:
        """When the states of threads were recorded."""
        return str(self._notes.get("threads", {}).get("as_of", ""))

    def _entry(self, topic: Topic) -> Mapping[str, Any]:
        entry = self._notes.get("topics", {}).get(topic.name, {})
        assert isinstance(entry, dict)
        return entry

    def strangers(self, known: set[str]) -> list[str]:
        """Topics with an entry that are not in the series: written ahead, or left over."""
        return sorted(set(self._notes.get("topics", {})) - known)

    def thread(self, project: str, number: int) -> Thread:
        """A thread with what is recorded of it."""
        kind, state, says = self._notes.get("threads", {}).get(project, {}).get(str(number), ("", "", ""))
        return Thread(project, number, kind, state, says)

    def threads(self, topic: Topic) -> list[Thread]:
        """Threads that a topic answers: those of its entry, then those that only its own file names."""
        found: dict[str, Thread] = {}
        for name in self._entry(topic).get("answers", ()):
            match = _THREAD.fullmatch(name)
            if match is None:
                raise EngineError(
                    f"patches/review.toml: {topic.name} answers {name!r}, which is no sglang#N or vllm#N"
                )
            found[name] = self.thread(match[1], int(match[2]))
        for repository, number in _URL.findall(topic.upstream):
            short = next(key for key, value in REPOSITORIES.items() if value == repository)
            found.setdefault(f"{short}#{number}", self.thread(short, int(number)))
        return list(found.values())

    def next(self, topic: Topic) -> str:
        """The next step with upstream."""
        return str(self._entry(topic).get("next", "undecided"))

    def plan(self, topic: Topic) -> str:
        """What to do where it no longer applies."""
        return " ".join(str(self._entry(topic).get("plan", "")).split())

    def state(self, topic: Topic) -> str:
        """How the topic stood on the newer version: applies, not needed, not tried, or what was lost."""
        return str(self.forward.get("topics", {}).get(topic.name, UNTRIED))

    def rows(self, topic: Topic) -> dict[str, Mapping[str, Any]]:
        """Headline figures that belong to the topic, by name."""
        starts = tuple(self._entry(topic).get("rows", ()))
        return (
            {name: entry for name, entry in self._headline.items() if name.startswith(starts)}
            if starts
            else {}
        )

    @cached_property
    def _headline(self) -> dict[str, Mapping[str, Any]]:
        path = self.project.root / "benchmark" / "results" / "headline.json"
        if not path.is_file():
            return {}
        loaded = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(loaded, dict)
        return loaded

    @cached_property
    def companions(self) -> Companions:
        """The test tree."""
        return Companions(self.project.root)

    def tests(self, topic: Topic) -> list[str]:
        """Test files of a topic."""
        return self.companions.tests(topic, self._topics)

    @cached_property
    def _topics(self) -> list[Topic]:
        return self.project.topics()


def forward_file(project: Project) -> Path:
    """Where a look forward is recorded."""
    return project.root / "patches" / "forward.toml"


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
