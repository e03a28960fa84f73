"""All declared settings, and how our own code reads them."""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import pkgutil
from collections.abc import Iterable, Mapping
from functools import lru_cache

from sglang.srt.verify_settings.declare import FALSE, Setting, refuse
from sglang.srt.verify_settings.names import NAMES

PACKAGE = "sglang.srt.verify_settings.declared"
# Names that begin with one of these are ours: an undeclared one is a slip.
OWN_PREFIXES = ("SGLANG_FORK_", "SGLANG_SPEC_")
# Variables that upstream itself reads under our prefixes.
UPSTREAMS = frozenset({"SGLANG_SPEC_EXPANSION_SAFETY_FACTOR", "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"})


@lru_cache(maxsize=1)
def declared() -> dict[str, Setting]:
    """Every declared setting by name.

    Raises:
        ValueError: two modules declare the same name.
    """
    found: dict[str, Setting] = {}
    for entry in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__):
        settings: tuple[Setting, ...] = importlib.import_module(f"{PACKAGE}.{entry.name}").SETTINGS
        for setting in settings:
            if setting.name in found:
                raise ValueError(
                    f"{setting.name} is declared twice, the second time in {PACKAGE}.{entry.name}"
                )
            found[setting.name] = setting
    return found


def setting(name: str) -> Setting:
    """A declared setting. Raises KeyError for a name that no module declares: declare it first."""
    try:
        return declared()[name]
    except KeyError:
        raise KeyError(f"{name} is not declared in {PACKAGE}") from None


def read_text(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The value as set, None where it is unset or empty.

    Raises:
        SettingError: the value is not of the declared kind.
        KeyError: the name is not declared.
    """
    known = setting(name)
    value = environment.get(name, "").strip()
    if not value:
        return None
    problem = known.problem(value)
    if problem is not None:
        raise refuse(known, value, problem)
    return value


def read_flag(name: str, environment: Mapping[str, str] = os.environ, default: bool = False) -> bool:
    """A flag; ``default`` where it is unset. Raises as ``read_text``."""
    value = read_text(name, environment)
    return default if value is None else value.lower() not in FALSE


def read_int(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """A whole number; ``default`` where it is unset. Raises as ``read_text``."""
    value = read_text(name, environment)
    return default if value is None else int(value)


def read_float(name: str, default: float, environment: Mapping[str, str] = os.environ) -> float:
    """A number; ``default`` where it is unset. Raises as ``read_text``."""
    value = read_text(name, environment)
    return default if value is None else float(value)


def read_list(name: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The parts between commas without blanks, none where it is unset. Raises as ``read_text``."""
    value = read_text(name, environment)
    return [part.strip() for part in value.split(",") if part.strip()] if value else []


def nearest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The known name that ``name`` is most likely a slip of; None where none is near.

    A prefix that all of them share would make everything near, so it is left out of the comparison.
    """
    names = list(known)
    columns = zip(*(other.split("_") for other in (name, *names)), strict=False)
    shared = sum(
        len(words[0]) + 1 for words in itertools.takewhile(lambda words: len(set(words)) == 1, columns)
    )
    near = difflib.get_close_matches(name[shared:], [other[shared:] for other in names], n=1, cutoff=cutoff)
    return name[:shared] + near[0] if near else None


def slips(environment: Mapping[str, str], nccl_names: Iterable[str]) -> dict[str, str | None]:
    """Variables that nobody reads, each with the nearest real name.

    Args:
        environment: the variables as set.
        nccl_names: what the NCCL in use reads; where it cannot be asked, none: the pinned one is then assumed.

    An unknown ``NCCL_`` name is a slip only where a real name is near: plugins have variables of their own. One
    with our prefix is always a slip.
    """
    ours = [name for name in declared() if name.startswith(OWN_PREFIXES)]
    theirs = (set(nccl_names) or set(NAMES)) | {name for name in declared() if name.startswith("NCCL_")}
    found: dict[str, str | None] = {}
    for name in sorted(environment):
        if name in ours or name in UPSTREAMS:
            continue
        prefix = next((prefix for prefix in OWN_PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            found[name] = nearest(name, [other for other in ours if other.startswith(prefix)])
        elif name.startswith("SGLANG_") and (near := nearest(name, ours, cutoff=0.9)) is not None:
            found[name] = near  # The slip is in the prefix itself.
        elif name.startswith("NCCL_") and name not in theirs:
            near = nearest(name, theirs)
            if near is not None:
                found[name] = near
    return found


def markdown(prefixes: tuple[str, ...]) -> str:
    """A table of the declared settings whose names begin with one of ``prefixes``, for docs/settings.md."""
    lines = ["| variable | values | unset | meaning | read by |", "| --- | --- | --- | --- | --- |"]
    for name, entry in sorted(declared().items()):
        if name.startswith(prefixes):
            cells = (f"`{name}`", _values(entry), entry.default or "-", entry.meaning, entry.reader)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _values(entry: Setting) -> str:
    if entry.kind == "choice":
        # The same word in upper and lower case is one choice.
        return ", ".join(
            dict.fromkeys(
                choice.upper() if choice.islower() and choice.upper() in entry.choices else choice
                for choice in entry.choices
            )
        )
    words = {"flag": "0, 1", "int": "whole number", "float": "number", "list": "list"}.get(
        entry.kind, entry.kind
    )
    if entry.least is not None and entry.most is not None:
        return f"{words} {entry.least:g} to {entry.most:g}"
    return f"{words} from {entry.least:g}" if entry.least is not None else words
