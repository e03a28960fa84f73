"""Two GPUs, one process each: exact sums against NCCL, 10,000 replays of interleaved graphs, with either way to share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from pairs import run_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SCRIPT = Path(__file__).with_name("one_shot_pair.py")
REPLAYS = os.environ.get("ONE_SHOT_REPLAYS", "10000")
LIMIT_S = 240.0


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_sums_and_replays_are_those_of_nccl(tmp_path: Path, segments: str) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": segments}
    done = run_pair(SCRIPT, tmp_path / "store", REPLAYS, environment=environment, limit_s=LIMIT_S)
    texts = [process.stdout for process in done]
    for text in texts:
        assert text.strip().splitlines()[-1:] == ["ok"], "\n".join(texts)
