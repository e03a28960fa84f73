"""Two ranks as processes of their own, each a run of one script; none outlives the deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_pair(
    script: Path, store: Path, *words: str, environment: Mapping[str, str], limit_s: float
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``script RANK 2 STORE *words`` for both ranks; what each said (stdout and stderr) and its status, by rank.

    Raises:
        subprocess.TimeoutExpired: a rank said nothing for ``limit_s`` seconds; both are killed.
    """
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(store), *words],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    done = []
    try:
        for process in running:
            text, _ = process.communicate(timeout=limit_s)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, text))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    return done
