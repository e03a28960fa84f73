"""Version numbers and requirement lines, as far as the pins of a Python package use them.

Written out because the doctor must work where nothing but the interpreter is installed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERSION = re.compile(
    r"^v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>a|b|c|rc|alpha|beta|pre)[-_.]?(?P<pre_n>\d*))?"
    r"(?:(?:[-_.]?post[-_.]?|-)(?P<post>\d*))?"
    r"(?:[-_.]?dev[-_.]?(?P<dev>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?$",
    re.IGNORECASE,
)
_REQUIREMENT = re.compile(
    r"^\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*(?P<spec>[^;]*)(?:;(?P<marker>.*))?$"
)
_CLAUSE = re.compile(r"^(===|==|~=|!=|<=|>=|<|>)\s*(\S+)$")

Key = tuple[tuple[int, ...], tuple[int, int], int, int]


def key(version: str) -> Key | None:
    """Sort key of a version without its local part; None where the text is no version."""
    match = _VERSION.match(version.strip())
    if match is None:
        return None
    release = tuple(int(part) for part in match["release"].split("."))
    while len(release) > 1 and release[-1] == 0:
        release = release[:-1]
    dev = -1 if match["dev"] is None else int(match["dev"] or 0)
    post = -1 if match["post"] is None else int(match["post"] or 0)
    if match["pre"] is not None:
        rank = {"a": 0, "alpha": 0, "b": 1, "beta": 1}.get(match["pre"].lower(), 2)
        pre = (rank, int(match["pre_n"] or 0))
    else:
        # A bare development version comes before every pre-release, a final version after them.
        pre = (-1, 0) if dev >= 0 and post < 0 else (3, 0)
    return release, pre, post, dev if dev >= 0 else 1 << 30


def local(version: str) -> str:
    """The part after ``+``, or an empty string."""
    return version.partition("+")[2]


@dataclass(frozen=True)
class Requirement:
    """``name``, its comma-separated version clauses, and the marker after the semicolon."""

    name: str
    specifier: str
    marker: str = ""


def parse_requirement(line: str) -> Requirement | None:
    """A line of ``Requires-Dist``; None where it is of another form (a URL)."""
    match = _REQUIREMENT.match(line)
    if match is None or "@" in match["spec"]:
        return None
    specifier = match["spec"].strip().strip("()").replace(" ", "")
    return Requirement(normal_name(match["name"]), specifier, (match["marker"] or "").strip())


def normal_name(name: str) -> str:
    """A distribution's name in the one form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def satisfies(version: str, specifier: str) -> bool | None:
    """Whether a version meets every clause; None where a version or a clause cannot be read."""
    have = key(version)
    if have is None:
        return None
    for clause in filter(None, specifier.split(",")):
        match = _CLAUSE.match(clause.strip())
        if match is None:
            return None
        answer = _clause(version, have, match[1], match[2])
        if answer is not True:
            return answer
    return True


def _clause(version: str, have: Key, operator: str, wanted: str) -> bool | None:
    if operator in ("==", "!=") and wanted.endswith(".*"):
        prefix = [int(part) for part in wanted[:-2].split(".")]
        release = list(have[0]) + [0] * len(prefix)
        return (release[: len(prefix)] == prefix) == (operator == "==")
    want = key(wanted)
    if want is None:
        return None
    if operator in ("==", "===", "!="):
        equal = have == want and (not local(wanted) or local(wanted) == local(version))
        return equal != (operator == "!=")
    if operator == "~=":
        parts = wanted.split(".")[:-1]
        return have >= want and bool(_clause(version, have, "==", ".".join(parts) + ".*"))
    return {"<": have < want, "<=": have <= want, ">": have > want, ">=": have >= want}[operator]
