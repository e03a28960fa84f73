"""Run a folder of ``check_*.py`` files in a process where Triton interprets: the switch is read when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def assert_passes_interpreted(folder: Path, limit_s: float) -> None:
    """Fail with the child's output unless its checks ran and passed within ``limit_s`` seconds.

    The parent of ``folder`` comes first on the child's path, so that checks can import what lies beside it.
    """
    path = os.pathsep.join([str(folder.parent), *(p for p in sys.path if p)])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore",
        "-o", "python_files=check_*.py", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, "the child collected nothing"
