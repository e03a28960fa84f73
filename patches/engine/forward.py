"""Tries the patches on another upstream version: which anchors still resolve, topic by topic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from patches.engine.compose import refuse_clashes
from patches.engine.errors import EngineError, UsageError
from patches.engine.project import Project
from patches.engine.review import APPLIES, LOST, forward_file
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


def states(outcome: Forward) -> dict[str, str]:
    """By topic: applies, not needed, or which anchors are lost."""
    found: dict[str, str] = {}
    for row in outcome.rows:
        if row.topic in outcome.unneeded:
            found[row.topic] = NOT_NEEDED
        elif row.good:
            found.setdefault(row.topic, APPLIES)
        else:
            place = f"{row.scope or row.file}"
            known = found.get(row.topic, APPLIES)
            found[row.topic] = f"{known}, {place}" if known.startswith(LOST) else f"{LOST}: {place}"
    return found


def differences(recorded: dict[str, str], found: dict[str, str]) -> tuple[list[str], list[str]]:
    """What contradicts the record, and what the record does not know yet but is fine."""
    wrong, new = [], []
    for name, state in found.items():
        before = recorded.get(name)
        if before == state:
            continue
        if before is None and not state.startswith(LOST):
            new.append(f"{name}: {state}")
        else:
            wrong.append(f"{name}: {before or 'not recorded'} -> {state}")
    return wrong, new


def record(project: Project, version: str, found: dict[str, str]) -> None:
    """Write ``patches/forward.toml``."""
    lines = ["# Written by `make check-forward RECORD=1`.", f'version = "{version}"', "", "[topics]"]
    lines += [f'{name} = "{state}"' for name, state in found.items()]
    forward_file(project).write_text("\n".join(lines) + "\n", encoding="utf-8")


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
