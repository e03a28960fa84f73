"""Two GPUs, one process each: exact sums against NCCL, 10,000 replays of interleaved graphs, with either way to share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SCRIPT = Path(__file__).with_name("one_shot_pair.py")
REPLAYS = os.environ.get("ONE_SHOT_REPLAYS", "10000")
LIMIT_S = 240.0


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_sums_and_replays_are_those_of_nccl(tmp_path: Path, segments: str) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": segments}
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", str(tmp_path / "store"), REPLAYS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = []
    try:
        for process in running:
            text, _ = process.communicate(timeout=LIMIT_S)
            texts.append(text)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for text in texts:
        assert text.strip().splitlines()[-1:] == ["ok"], "\n".join(texts)
