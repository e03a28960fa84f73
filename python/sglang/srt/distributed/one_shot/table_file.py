"""The file that ``python -m sglang.bench_all_reduce`` writes and a server reads."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from sglang.srt.distributed.one_shot.policy import Key, Point, Table, from_measurements, shipped

SCHEMA = "all-reduce-table/1"


class TableError(ValueError):
    """A file that is no table, or one that cannot be used; the message names the file and what is wrong."""


def default_path(key: Key, home: Path | None = None) -> Path:
    """Where a table of this machine lies unless a setting names another place.

    ``$XDG_CACHE_HOME`` (or ``~/.cache``) ``/sglang-fork/all-reduce/GPU-LINK-xRANKS-DRIVER.json``.
    """
    root = home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    words = re.sub(r"[^A-Za-z0-9.]+", "_", f"{key.gpu}-{key.link}-x{key.ranks}-{key.driver or 'unknown'}")
    return root / "sglang-fork" / "all-reduce" / f"{words}.json"


def save(table: Table, path: Path, taken: str = "") -> None:
    """Write in one step, so that a server that starts meanwhile never reads half a file.

    Raises:
        TableError: the table holds no measurement: a default has to be revisable by a newer version.
    """
    if not table.points:
        raise TableError(f"{path}: only measured tables are written ({table.origin})")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    document = {
        "schema": SCHEMA,
        "key": dataclasses.asdict(table.key),
        "taken": taken,
        "points": [dataclasses.asdict(point) for point in table.points],
    }
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def load(path: Path) -> Table:
    """Read a table.

    Raises:
        TableError: not readable, not JSON, another schema, or points that are not measurements.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise TableError(f"{path}: schema is not {SCHEMA}; write it again with bench_all_reduce")
    try:
        return _build(document, path)
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path}: {type(error).__name__}: {error}") from error


def _build(document: dict[str, Any], path: Path) -> Table:
    points = [_point(point) for point in document["points"]]
    return from_measurements(
        Key(**document["key"]), points, f"measured here {document.get('taken', '')}".strip()
    )


def _point(point: dict[str, Any]) -> Point:
    times = {str(method): float(us) for method, us in point["us"].items()}
    return Point(str(point["kind"]), int(point["rows"]), int(point["bytes"]), times)


def to_document(table: Table) -> dict[str, Any]:
    """Any table, measured or not, as JSON values: rank 0 sends its own to the others."""
    return dataclasses.asdict(table)


def from_document(document: dict[str, Any]) -> Table:
    """The inverse of ``to_document``."""
    return Table(
        Key(**document["key"]),
        tuple(_point(point) for point in document["points"]),
        dict(document["limits"]),
        document["origin"],
    )


def find(key: Key, named: str = "") -> tuple[Table, str]:
    """The table for a machine, and why it is not a better one ("" when it was measured here).

    Args:
        key: the machine as it is now.
        named: a file that a setting names; it has to fit the machine like any other.
    """
    path = Path(named) if named else default_path(key)
    if not path.exists():
        missing = f"{path} does not exist" if named else "not measured on this machine"
        return shipped(key), f"{missing}; run `python -m sglang.bench_all_reduce --write`"
    try:
        table = load(path)
    except TableError as error:
        return shipped(key), str(error)
    differing = [
        f"{name} {getattr(table.key, name)!r} there, {getattr(key, name)!r} here"
        for name in ("gpu", "link", "ranks", "driver")
        if getattr(table.key, name) != getattr(key, name)
    ]
    if differing:
        return shipped(
            key
        ), f"{path} was measured on another machine ({'; '.join(differing)}); measure this one"
    return table, ""
