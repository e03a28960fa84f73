"""Tries the patches on another upstream version: which anchors still resolve, topic by topic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from patches.engine.compose import refuse_clashes
from patches.engine.errors import EngineError, UsageError
from patches.engine.project import Project
from patches.engine.survey import NOT_NEEDED, Row, applicable, archive_sources, survey, try_together

_WHEEL = re.compile(r"sglang-([^-]+)-.*\.whl")


@dataclass(frozen=True)
class Forward:
    """The outcome: version looked at, one row for each edit, topics that apply or are not needed, faults."""

    version: str
    rows: list[Row]
    applies: list[str]
    unneeded: list[str]
    total: int
    faults: list[str]


def forward(project: Project, wheel: Path) -> Forward:
    """Survey the patches on the upstream version in ``wheel``; file hashes are waived.

    Raises:
        UsageError: ``wheel`` is not the file of an sglang wheel.
    """
    named = _WHEEL.fullmatch(wheel.name)
    if named is None or not wheel.is_file():
        raise UsageError(f"{wheel} is not an sglang wheel (sglang-VERSION-...whl)")
    version = named.group(1)
    sources = archive_sources(wheel)
    topics = project.topics()
    rows = survey(topics, sources, version, None)
    fit = applicable(topics, rows)
    faults = []
    together = try_together(fit, sources, version)
    if together is not None:
        faults.append(f"the topics that resolve do not apply together: {together}")
    try:
        refuse_clashes(project.overlay(), sources, version)
    except EngineError as error:
        faults.append(str(error))
    unneeded = {row.topic for row in rows if row.state == NOT_NEEDED}
    names = [topic.name for topic in fit]
    return Forward(
        version,
        rows,
        [name for name in names if name not in unneeded],
        [name for name in names if name in unneeded],
        len(topics),
        faults,
    )
