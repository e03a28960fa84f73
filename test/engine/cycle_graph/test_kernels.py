"""Runs ``interpreted/`` in a process where Triton interprets, and reports its failures as this test's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 300


def test_glue_under_the_interpreter() -> None:
    path = os.pathsep.join([str(HERE), *(p for p in sys.path if p)])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore",
        "-o", "python_files=check_*.py", str(HERE / "interpreted"),
    ]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, "the child collected nothing"
