"""What a check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Level(str, Enum):
    """How bad it is. Only a fault breaks serving; a warning costs speed or safety; a note is for information."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``about`` is what was looked at, ``found`` the value and the limit, ``cure`` what to do, ``group`` the part of
    the report. A warning or a fault without a cure is an error of the check.
    """

    level: Level
    about: str
    found: str
    cure: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        if self.level in (Level.WARNING, Level.FAULT) and not self.cure:
            raise ValueError(f"a {self.level.value} about {self.about} needs a cure")

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self) | {"level": self.level.value}


def ok(about: str, found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, about, found)


def note(about: str, found: str) -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, about, found)


def warning(about: str, found: str, cure: str) -> Finding:
    """Serving works, but slower or less safely than it could."""
    return Finding(Level.WARNING, about, found, cure)


def fault(about: str, found: str, cure: str) -> Finding:
    """Serving fails."""
    return Finding(Level.FAULT, about, found, cure)


def worst(findings: list[Finding]) -> Level:
    """The highest level among the findings."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
