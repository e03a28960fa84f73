"""Scripts on our own modules alone: upstream's package, five seconds of imports, is entered as a namespace."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(first: Path | None = None, **more: str) -> dict[str, str]:
    """This process's environment with the repository's ``python`` and ``sgl-kernel/python`` on the path.

    For an interpreter with ``-S``: installed packages are found, but their .pth files are not read, among which an
    editable fork would come first.

    Args:
        first: a folder that comes before all others on the path.
        more: further variables.
    """
    paths = [ROOT / "python", ROOT / "sgl-kernel" / "python", *site.getsitepackages()]
    joined = os.pathsep.join(map(str, [first, *paths] if first else paths))
    return {**os.environ, "PYTHONPATH": joined, **more}


def run_python(
    *arguments: str, first: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` to its end in :func:`environment`.

    Args:
        arguments: of the interpreter.
        first: a folder that comes before all others on the path.
        timeout: seconds.
    """
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env=environment(first),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
