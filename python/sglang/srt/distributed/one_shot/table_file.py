"""The file that ``python -m sglang.bench_all_reduce`` writes and a server reads."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.distributed.one_shot.policy import Key, Point, Table, from_measurements, shipped

SCHEMA = "all-reduce-table/2"
#: Of our kernels' speed: another one makes older figures useless. A new method beside them does not: a table without
#: its figures goes on, and never chooses it.
KERNELS = 2
#: A table has some dozens of points; what is larger is another file.
LARGEST = 1 << 20
CURE = "`python -m sglang.bench_all_reduce --write` measures this machine"


class TableError(ValueError):
    """A file that is no table, or one that cannot be used; the message names the file, what is wrong and the cure."""


@dataclass(frozen=True)
class Found:
    """A table for a machine.

    Attributes:
        table: measured here, or the shipped default.
        advice: why it is not a measured one; "" if it is.
        refused: there is a file and it was not used, which a person has to hear of.
    """

    table: Table
    advice: str = ""
    refused: bool = False


def made_with() -> dict[str, Any]:
    """What a table's figures depend on beside the machine: our kernels, and the upstream that they are held against."""
    from sglang.version import __version__

    return {"kernels": KERNELS, "base": str(__version__).partition("+")[0]}


def folder(home: Path | None = None) -> Path:
    """Where measured tables lie: ``$XDG_CACHE_HOME`` (or ``~/.cache``) ``/sglang-fork/all-reduce``."""
    root = home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "sglang-fork" / "all-reduce"


def default_path(key: Key, home: Path | None = None) -> Path:
    """Where a table of this machine lies unless a setting names another place: ``GPU-LINK-xRANKS-DRIVER.json``."""
    words = re.sub(r"[^A-Za-z0-9.]+", "_", f"{key.gpu}-{key.link}-x{key.ranks}-{key.driver or 'unknown'}")
    return folder(home) / f"{words}.json"


def save(table: Table, path: Path, taken: str = "") -> None:
    """Write in one step, so that a server that starts meanwhile never reads half a file.

    Raises:
        TableError: the table holds no measurement: a default has to be revisable by a newer version.
        OSError: the folder cannot be written.
    """
    if not table.points:
        raise TableError(f"{path}: only measured tables are written ({table.origin})")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    document = {
        "schema": SCHEMA,
        "key": dataclasses.asdict(table.key),
        "taken": taken,
        "made_with": made_with(),
        "points": [dataclasses.asdict(point) for point in table.points],
    }
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read(path: Path) -> dict[str, Any]:
    """The document of a file, whole and of this format; its points are not looked at (``parse``).

    Raises:
        TableError: not readable, too large, cut off or no JSON, or another format.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise TableError(f"{path}: {size:,} bytes are no table; {CURE}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read ({error}); {CURE}") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise TableError(f"{path}: cut off, or no JSON ({error}); {CURE}") from error
    found = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or found != SCHEMA:
        what = f"format {found}, this version reads {SCHEMA}" if found else f"no {SCHEMA}"
        raise TableError(f"{path}: {what}; {CURE}")
    return document


def parse(document: Mapping[str, Any], where: object) -> Table:
    """The table of a document.

    Args:
        document: of ``read``.
        where: file, for the message.

    Raises:
        TableError: a missing field, points that are not measurements, or figures of other kernels.
    """
    try:
        points = [_point(point) for point in document["points"]]
        origin = f"measured here {document.get('taken', '')}".strip()
        table = from_measurements(Key(**document["key"]), points, origin)
        then = dict(document["made_with"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise TableError(f"{where}: {what}; {CURE}") from error
    now = made_with()
    differing = [
        f"{name} {then.get(name)} there, {now[name]} here" for name in now if then.get(name) != now[name]
    ]
    if differing:
        raise TableError(f"{where}: its figures are of another version ({'; '.join(differing)}); {CURE}")
    return table


def load(path: Path) -> Table:
    """``read`` and ``parse``. Raises TableError."""
    return parse(read(path), path)


def _point(point: Mapping[str, Any]) -> Point:
    times = {str(method): float(us) for method, us in point["us"].items()}
    return Point(str(point["kind"]), int(point["rows"]), int(point["bytes"]), times)


def to_document(table: Table) -> dict[str, Any]:
    """Any table, measured or not, as JSON values: rank 0 sends its own to the others."""
    return dataclasses.asdict(table)


def from_document(document: Mapping[str, Any]) -> Table:
    """The inverse of ``to_document``."""
    limits = {
        str(kind): tuple((str(method), int(size)) for method, size in spans)
        for kind, spans in document["limits"].items()
    }
    points = tuple(_point(point) for point in document["points"])
    return Table(Key(**document["key"]), points, limits, document["origin"])


def differences(table: Key, here: Key) -> str:
    """In what a table's machine is not this one; "" where it is."""
    return "; ".join(
        f"{name} {getattr(table, name)!r} there, {getattr(here, name)!r} here"
        for name in ("gpu", "link", "ranks", "driver")
        if getattr(table, name) != getattr(here, name)
    )


def find(key: Key, named: str = "") -> Found:
    """The table for a machine.

    Args:
        key: the machine as it is now.
        named: a file that a setting names; it has to fit the machine like any other.
    """
    path = Path(named) if named else default_path(key)
    if not path.exists():
        if named:
            return Found(shipped(key), f"{path}: there is no such file; {CURE}", refused=True)
        return Found(shipped(key), f"not measured on this machine; {CURE}")
    try:
        document = read(path)
    except TableError as error:
        return Found(shipped(key), str(error), refused=True)
    return chosen(key, document, path)


def chosen(key: Key, document: Mapping[str, Any], where: object) -> Found:
    """The table of a document if it is sound and of this machine, else the shipped one with the reason."""
    try:
        table = parse(document, where)
    except TableError as error:
        return Found(shipped(key), str(error), refused=True)
    differing = differences(table.key, key)
    if differing:
        return Found(
            shipped(key), f"{where}: measured on another machine ({differing}); {CURE}", refused=True
        )
    return Found(table)


def recorded(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Files as JSON values for the doctor's facts: ``file`` with ``document``, or with ``problem``."""
    found = []
    for path in paths:
        try:
            found.append({"file": str(path), "document": read(path)})
        except TableError as error:
            found.append({"file": str(path), "problem": str(error)})
    return found
