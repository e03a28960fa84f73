"""A slow start names itself, and the start probe's conclusions."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from pathlib import Path

import pytest
from sglang.bench_all_reduce import start_probe
from sglang.bench_all_reduce.start_probe import BASE, Outcome, conclude
from sglang.bench_all_reduce.start_steps import STEPS
from sglang.fork import counters
from sglang.srt.distributed.one_shot import slow


@pytest.mark.parametrize(
    ("stack", "programs", "expected"),
    [
        (["in fusion", "in allgather", "in recv_fd"], [], "Unix socket"),
        (
            ["in build_and_load", "in communicate"],
            ["python", "ninja", "cicc"],
            "compiler is at work (ninja, cicc)",
        ),
        (["in build_and_load", "in flock"], [], "builds or loads"),
        (["in barrier"], [], "barrier"),
        (["in ncclCommInitRank"], [], "NCCL connects"),
        (["in somewhere"], ["python"], "no known sign"),
        ([], [], "no known sign"),
        # The innermost sign is where it stands; the ones above only led there.
        (["in barrier", "in new_group"], [], "process group"),
    ],
)
def test_diagnosis(stack: list[str], programs: list[str], expected: str) -> None:
    assert expected in slow.diagnose(stack, programs)


def recv_fd(seconds: float) -> None:
    time.sleep(seconds)


def test_a_slow_step_names_itself_once(caplog: pytest.LogCaptureFixture) -> None:
    counters.reset()
    with caplog.at_level(logging.WARNING, "sglang.fork"), slow.telling("a workspace", "try that", 0.1):
        recv_fd(0.5)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert "a workspace has taken 0 s and is not done" in lines[0]
    assert "Unix socket" in lines[0] and "try that" in lines[0] and "in recv_fd" in lines[0]
    assert any(key.startswith("slow_start{") for key in counters.snapshot())


def test_a_quick_step_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sglang.fork"), slow.telling("a workspace", "", 0.2):
        pass
    with pytest.raises(KeyError), slow.telling("a workspace", "", 0.2):
        raise KeyError
    time.sleep(0.4)
    assert not caplog.records


def test_descendants_of_a_real_process() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 20 & sleep 20; true"])
    try:
        deadline = time.monotonic() + 5
        names: list[str] = []
        while time.monotonic() < deadline and names.count("sleep") < 2:
            names = slow.descendants(child.pid)
        assert names.count("sleep") == 2
    finally:
        for line in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
            subprocess.run(["kill", line], check=False)
        child.kill()
        child.wait()


def test_names_with_blanks_and_brackets(tmp_path: Path) -> None:
    for pid, text in ((7, "7 (a) b) S 1 7"), (8, "8 (c c) S 7 8"), (9, "9 (x) S 2 9")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(text)
    assert sorted(slow.descendants(1, tmp_path)) == ["a) b", "c c"]


STEP = STEPS[9].name


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome(BASE, STEP, "ok", 1.0)], "did not show itself"),
        ([Outcome(BASE, STEP, "ok", 130.0)], "slow, not hung (130 s)"),
        (
            [Outcome(BASE, STEP, "hung"), Outcome("NCCL_CUMEM_ENABLE=1", STEP, "ok", 1.0)],
            "passes with NCCL_CUMEM_ENABLE=1",
        ),
        (
            [Outcome(BASE, STEP, "hung"), Outcome("NCCL_P2P_DISABLE=1", STEP, "hung")],
            "not a matter of these settings",
        ),
        ([Outcome(BASE, STEP, "failed", detail="RuntimeError: 3 of 4096 bytes")], "3 of 4096 bytes"),
    ],
)
def test_conclusions(outcomes: list[Outcome], expected: str) -> None:
    assert expected in "\n".join(conclude(outcomes))


def test_variants_change_one_thing_and_keep_the_users_settings() -> None:
    plain = start_probe.environment(BASE, {"NCCL_P2P_LEVEL": "SYS", "NCCL_CUMEM_ENABLE": "1"})
    assert plain["NCCL_P2P_LEVEL"] == "SYS" and plain["NCCL_CUMEM_ENABLE"] == "1"
    for variant in start_probe.VARIANTS:
        made = start_probe.environment(variant, {})
        assert len(set(made.items()) ^ set(start_probe.environment(BASE, {}).items())) <= 2
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in start_probe.environment("no CUDA_DEVICE_MAX_CONNECTIONS", {})


def records(place: Path, rank: int, *entries: tuple[str, str, float, str]) -> None:
    lines = [
        json.dumps({"step": step, "state": state, "at": 0, "seconds": seconds, "detail": detail})
        for step, state, seconds, detail in entries
    ]
    (place / f"{rank}.jsonl").write_text("\n".join(lines) + '\n{"step": "half a li', encoding="utf-8")


def test_records_of_two_ranks_become_outcomes(tmp_path: Path) -> None:
    first, second, third = (step.name for step in STEPS[:3])
    records(tmp_path, 0, (first, "begun", 0, ""), (first, "ok", 1.0, "x"), (second, "begun", 0, ""))
    records(
        tmp_path,
        1,
        (first, "begun", 0, ""),
        (first, "ok", 3.0, "x"),
        (second, "begun", 0, ""),
        (second, "ok", 1, ""),
    )
    (tmp_path / "0.stacks").write_text("Timeout!")
    found = {outcome.step: outcome for outcome in start_probe._read(BASE, tmp_path, [third])}
    assert (found[first].state, found[first].seconds) == ("ok", 3.0)
    assert found[second].state == "hung" and "0.stacks" in found[second].detail
    assert found[third].state == "skipped"


def test_without_two_gpus_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.device_count() >= 2:
        pytest.skip("has the GPUs")
    assert start_probe.main([]) == 2
    assert "2 GPUs are needed" in capsys.readouterr().err
