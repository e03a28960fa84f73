"""Scripts on our own modules alone: upstream's package, five seconds of imports, is entered as a namespace."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    *arguments: str, first: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` to its end with the repository's ``python`` and ``sgl-kernel/python`` on the path.

    Installed packages are found, but their .pth files are not read (-S): an editable fork would come first.

    Args:
        arguments: of the interpreter.
        first: a folder that comes before all others on the path.
        timeout: seconds.
    """
    paths = [ROOT / "python", ROOT / "sgl-kernel" / "python", *site.getsitepackages()]
    joined = os.pathsep.join(map(str, [first, *paths] if first else paths))
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": joined},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
