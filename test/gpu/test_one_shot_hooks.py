"""The hooks on a GPU that two ranks share: NCCL refuses such ranks, our kernels do not mind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from pairs import run_pair
from sglang.srt.distributed.one_shot.ending import STATUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPT = Path(__file__).with_name("one_shot_group.py")
LIMIT_S = 110.0


def run(folder: Path, *words: str, protocol: str = "auto") -> list[subprocess.CompletedProcess[str]]:
    """Two ranks, each with its text."""
    environment = {"SGLANG_FORK_ALL_REDUCE": "force", "SGLANG_FORK_ALL_REDUCE_PROTOCOL": protocol}
    return run_pair(SCRIPT, folder / "store", *words, environment=environment, limit_s=LIMIT_S)


@pytest.mark.parametrize("protocol", ["flags", "packets"])
def test_eager_and_captured_reductions_through_the_coordinator(tmp_path: Path, protocol: str) -> None:
    done = run(tmp_path, protocol=protocol)
    for process in done:
        print(process.stdout)
        assert process.stdout.strip().splitlines()[-1] == "ok", process.stdout
        assert ("'packets'" in process.stdout) is (protocol == "packets")


@pytest.mark.parametrize("protocol", ["flags", "packets"])
def test_a_replay_that_waits_for_a_dead_rank_is_ended_with_its_name(tmp_path: Path, protocol: str) -> None:
    done = run(tmp_path, "die", protocol=protocol)
    print(done[0].stdout)
    assert done[1].returncode == 9
    assert done[0].returncode == STATUS, done[0].stdout
    assert "rank 1 (process" in done[0].stdout and "replayed" in done[0].stdout
