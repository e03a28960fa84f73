"""The NCCL library itself: which file it is, its version, and the variables that it reads.

A list of names in our code would be true of one version. The library keeps every name it asks for as text, so
the file tells. Nothing is loaded: NCCL cannot be without a driver.

Only its constants are read. Nearly all of its 200 MB is device code, and its debugging information names constants of
the interface that are no variables.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

FILE = "libnccl.so.2"
SO_VARIABLE = "SGLANG_NCCL_SO_PATH"
PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_BANNER = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
# Text of the same form that is no variable: log subsystems, error names and constants of the interface.
_OTHER_WORDS = """
    ALL ALLOC BOOTSTRAP CALL COLL ENV GRAPH INIT NET NVLS P2P PROXY RAS REG SHM TUNING PROFILE
    LOG_ABORT LOG_INFO LOG_NONE LOG_TRACE LOG_VERSION LOG_WARN LOG_PLUGIN
    NETDEVS_POLICY_AUTO SPLIT_NOCOLOR CONFIG_INITIALIZER SIM_INFO_INITIALIZER
"""
_NOT_READ = frozenset(f"NCCL_{word}" for word in _OTHER_WORDS.split())


@dataclass(frozen=True)
class Library:
    """``file`` is empty where no library was found, ``version`` where it does not say."""

    file: str
    version: str
    names: frozenset[str]


def loaded() -> Path | None:
    """The NCCL that this process has loaded; None where it has none."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if path and "libnccl.so" in path.rsplit("/", 1)[-1]:
            return Path("/" + path.removesuffix(" (deleted)"))
    return None


def installed() -> Path | None:
    """The NCCL that a worker would load: the named one, else that of the installed package."""
    named = os.environ.get(SO_VARIABLE, "")
    if named and Path(named).is_file():
        return Path(named)
    for package in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or []:
            path = Path(str(distribution.locate_file(file)))
            if path.name == FILE and path.is_file():
                return path
    return None


def read(path: Path | None = None) -> Library:
    """Version and variables of a library; by default the loaded one, else the installed one."""
    chosen = path or loaded() or installed()
    if chosen is None:
        return Library("", "", frozenset())
    try:
        with chosen.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            version, names = _look(constants(content))
            if not names:
                version, names = _look(content)
    except (OSError, ValueError):
        return Library(str(chosen), "", frozenset())
    return Library(str(chosen), version, frozenset(names - _NOT_READ))


def _look(content: bytes | mmap.mmap) -> tuple[str, set[str]]:
    """Version and names in ``content``."""
    banner = _BANNER.search(content)
    # A NUL ends one text and begins the next, so the one behind a text is only looked at. The pattern
    # begins with fixed bytes: with a look-behind in front the search takes twenty times as long.
    found = re.finditer(rb"\x00(NCCL_[A-Z0-9][A-Z0-9_]+)(?=\x00)", content)
    return banner[1].decode() if banner else "", {match[1].decode() for match in found}


def constants(content: mmap.mmap | bytes) -> bytes:
    """Section ``.rodata`` of a 64-bit little-endian ELF file; empty where it has none or is no such file."""
    if content[:6] != b"\x7fELF\x02\x01":
        return b""
    try:
        (table,) = struct.unpack_from("<Q", content, 40)
        size, count, texts = struct.unpack_from("<HHH", content, 58)

        def section(index: int) -> tuple[int, int, int]:
            """Offset of its name, offset and bytes of its content."""
            name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", content, table + index * size)
            return name, offset, length

        names = section(texts)[1]
        for index in range(count):
            name, offset, length = section(index)
            if content[names + name : names + name + 8] == b".rodata\0":
                return content[offset : offset + length]
    except struct.error:  # cut off, or its tables were stripped
        pass
    return b""
