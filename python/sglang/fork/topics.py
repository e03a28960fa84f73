"""Which topics this build carries, and which of them are switched off in this process."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

DISABLE_VARIABLE = "SGLANG_FORK_DISABLE"

APPLIED = "applied"
OFF = "off"
NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class TopicState:
    """One topic as it stands in this process.

    ``state`` is ``applied``, ``off`` (named in ``SGLANG_FORK_DISABLE``) or ``not needed`` (upstream
    already has it, found when the tree was composed); ``reason`` says why in one line.
    """

    name: str
    state: str
    reason: str
    why: str
    upstream: str
    retire_when: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The fork in one object: upstream version, fork version, and every topic in series order."""

    base: str
    version: str
    composed: bool
    topics: tuple[TopicState, ...]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {
            "base": self.base,
            "version": self.version,
            "composed": self.composed,
            "topics": [vars(topic) | {"files": list(topic.files)} for topic in self.topics],
        }

    def line(self) -> str:
        """The report in one log line."""
        if not self.composed:
            return "sglang fork: running from a tree that was not composed; no topic is applied"
        groups = []
        for state in (APPLIED, OFF, NOT_NEEDED):
            names = [topic.name for topic in self.topics if topic.state == state]
            if names:
                groups.append(f"{state}: {', '.join(names)}")
        return f"sglang fork {self.version} (base {self.base}); {'; '.join(groups) or 'no topics'}"


class UnknownTopicError(ValueError):
    """A topic name that this build does not carry."""


@lru_cache(maxsize=1)
def _composed() -> dict[str, Any] | None:
    """The manifest that composing writes next to this file; None in a tree that was not composed."""
    try:
        module = importlib.import_module("sglang.fork._composed")
    except ModuleNotFoundError:
        return None
    manifest: dict[str, Any] = module.MANIFEST
    return manifest


def _known() -> dict[str, dict[str, Any]]:
    manifest = _composed()
    return {} if manifest is None else {topic["name"]: topic for topic in manifest["topics"]}


def unknown_message(name: str, source: str) -> str:
    """The one message for a topic name that this build lacks, with the nearest name where one is near."""
    known = list(_known())
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{source}: unknown topic {name!r}.{hint} Topics of this build: {', '.join(known) or 'none'}."


@lru_cache(maxsize=1)
def disabled() -> frozenset[str]:
    """Topics named in ``SGLANG_FORK_DISABLE``.

    The variable is read once per process. A name that this build lacks ends the process with status 2:
    a misspelt switch that silently did nothing would make an A/B row compare the fork with itself.
    """
    names = [part.strip() for part in os.environ.get(DISABLE_VARIABLE, "").split(",")]
    names = [name for name in names if name]
    if _composed() is not None:
        for name in names:
            if name not in _known():
                print(unknown_message(name, DISABLE_VARIABLE), file=sys.stderr, flush=True)
                raise SystemExit(2)
    return frozenset(names)


@cache
def enabled(topic: str) -> bool:
    """Whether ``topic`` is in force in this process.

    Raises:
        UnknownTopicError: the build carries no such topic. In a tree that was not composed there is no
            list to check against, and every name that is not disabled counts as in force.
    """
    if _composed() is None:
        return topic not in disabled()
    entry = _known().get(topic)
    if entry is None:
        raise UnknownTopicError(unknown_message(topic, "sglang.fork.enabled"))
    return entry["state"] == APPLIED and topic not in disabled()


def topics() -> tuple[TopicState, ...]:
    """Every topic of this build in series order."""
    return report().topics


def report() -> Report:
    """The fork as it stands in this process."""
    manifest = _composed()
    if manifest is None:
        return Report(base="unknown", version="unknown", composed=False, topics=())
    states = []
    for entry in manifest["topics"]:
        state, reason = entry["state"], entry["reason"]
        if state == APPLIED and entry["name"] in disabled():
            state, reason = OFF, f"named in {DISABLE_VARIABLE}"
        states.append(
            TopicState(
                name=entry["name"],
                state=state,
                reason=reason,
                why=entry["why"],
                upstream=entry["upstream"],
                retire_when=entry["retire_when"],
                files=tuple(entry["files"]),
            )
        )
    return Report(base=manifest["base"], version=manifest["version"], composed=True, topics=tuple(states))


def reset() -> None:
    """Forget what was read from the environment and the manifest (for tests)."""
    for cached in (_composed, disabled, enabled):
        cached.cache_clear()
