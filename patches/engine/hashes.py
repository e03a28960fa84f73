"""Hashes of files and trees."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_SKIPPED_DIRECTORIES = {"__pycache__"}

# Files that differ between the wheels of one upstream version: the extension modules, named after the
# interpreter, and the installer's metadata. The tree hash leaves them out, so it is the same whichever
# wheel was composed; the hash of the wheel itself covers them.
_PER_PYTHON = re.compile(r"(\.cpython-\d+[^/]*\.so$)|(^[^/]+\.dist-info/)")


def digest(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """Hex sha256 of a file."""
    value = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            value.update(block)
    return value.hexdigest()


def list_files(root: Path) -> Iterable[str]:
    """All files below ``root`` as relative paths, byte code left out, in a fixed order."""
    for folder, directories, names in os.walk(root):
        directories[:] = sorted(name for name in directories if name not in _SKIPPED_DIRECTORIES)
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else relative.replace(os.sep, "/") + "/"
        for name in sorted(names):
            if not name.endswith(".pyc"):
                yield prefix + name


def tree_hash(hashes: Mapping[str, str]) -> str:
    """One hash over a composed tree, given the hash of each file; independent of the Python version."""
    value = hashlib.sha256()
    for name in sorted(hashes):
        if not _PER_PYTHON.search(name):
            value.update(f"{name}\0{hashes[name]}\n".encode())
    return value.hexdigest()
