"""What NCCL itself says it uses, from its own log: the last word on whether a setting reached it."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_SET = re.compile(r"\b(NCCL_[A-Z0-9_]+) set (?:by environment )?to (\S.*?)\.?\s*$")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\].*? via (\S+)")
_COUNT = re.compile(r"(\d+) coll channels, (\d+) collnet channels, (\d+) nvls channels, (\d+) p2p channels")
_WARN = re.compile(r"NCCL WARN (.+)$")
# A log grows with every communicator; what is looked for stands in its first part.
READ_AT_MOST = 4 << 20
WARNINGS_KEPT = 5


@dataclass
class NcclLog:
    """``settings`` as NCCL read them, ``transports`` of the connections it made (``P2P/IPC``, ``SHM/direct/direct``),
    ``channels`` of a collective, and its warnings."""

    version: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    channels: int | None = None
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)


def parse(text: str) -> NcclLog:
    """The log of one or several ranks."""
    found = NcclLog()
    transports: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _VERSION.search(line):
            found.version = match[1]
        elif match := _SET.search(line):
            found.settings[match[1]] = match[2]
        elif match := _CHANNEL.search(line):
            transports[match[3]] += 1
        elif match := _COUNT.search(line):
            found.channels = max(int(match[1]), found.channels or 0)
        elif (match := _WARN.search(line)) and len(found.warnings) < WARNINGS_KEPT:
            found.warnings.append(match[1].strip()[:300])
    found.transports = dict(transports)
    return found


def log_file(variables: Mapping[str, str], pid: int, host: str) -> Path | None:
    """Where the log of a process lies; None where NCCL logs nothing or to standard output."""
    if not variables.get("NCCL_DEBUG") or not variables.get("NCCL_DEBUG_FILE"):
        return None
    name = variables["NCCL_DEBUG_FILE"]
    return Path(name.replace("%h", host).replace("%p", str(pid)))


def read_own(variables: Mapping[str, str]) -> NcclLog | None:
    """The log of this process, None where there is none to read.

    NCCL puts the host's name up to its first dot into the file's name.
    """
    path = log_file(variables, os.getpid(), socket.gethostname().split(".")[0])
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return parse(file.read(READ_AT_MOST))
    except OSError:
        return None


def contradictions(variables: Mapping[str, str], log: NcclLog) -> list[str]:
    """Settings that NCCL says it read otherwise than they are set."""
    return [
        f"NCCL read {name} as {read}, but it is set to {variables[name]}"
        for name, read in sorted(log.settings.items())
        if name in variables and read.strip().lower() != variables[name].strip().lower()
    ]
