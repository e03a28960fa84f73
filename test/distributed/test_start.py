"""A slow start names itself, and the start probe's conclusions."""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.bench_all_reduce import start_probe
from sglang.bench_all_reduce.start_probe import BASE, Outcome, conclude
from sglang.bench_all_reduce.start_steps import STEPS, Step
from sglang.fork import counters
from sglang.srt.distributed.one_shot import slow, start_places

WORKSPACE = (
    "scheduler.py:run_scheduler_process base_runner.py:_pre_initialize_flashinfer_allreduce_workspace "
    "flashinfer_comm_fusion.py:initialize"
)
FUSION = f"{WORKSPACE} allreduce.py:__init__ trtllm_ar.py:trtllm_create_ipc_workspace_for_all_reduce_fusion"
EXCHANGE = f"{FUSION} mnnvl.py:_allocate_unicast_buffers"
GROUP = "parallel_state.py:init_model_parallel_group parallel_state.py:__init__"
#: Stacks as such starts have them (file:function, outermost first), and the place that each of them is at.
STACKS = {
    "bootstrap.py:init_torch_distributed distributed_c10d.py:init_process_group rendezvous.py:_tcp": "process group",
    f"{GROUP} distributed_c10d.py:new_group distributed_c10d.py:_new_process_group_helper": "groups of the ranks",
    f"{GROUP} pynccl.py:__init__ pynccl_wrapper.py:ncclCommInitRank": "pynccl's communicator",
    f"{GROUP} pynccl.py:__init__ streams.py:synchronize": "pynccl's first reduction",
    f"{GROUP} parallel_state.py:in_the_same_node_as distributed_c10d.py:barrier": "shared memory between ranks",
    f"{GROUP} custom_all_reduce_utils.py:gpu_p2p_access_check subprocess.py:communicate": "peer-access check",
    f"{GROUP} custom_all_reduce_v2.py:__init__ custom_all_reduce_v2.py:_init_workspace "
    "custom_all_reduce_v2.py:_allocate_symmetric_memory": "symmetric memory",
    f"{GROUP} custom_all_reduce_v2.py:__init__ custom_all_reduce_v2.py:_init_workspace "
    "distributed_c10d.py:barrier": "custom all-reduce, set-up",
    f"{GROUP} custom_all_reduce.py:__init__ custom_all_reduce.py:create_shared_buffer "
    "distributed_c10d.py:all_gather_object": "custom all-reduce, legacy IPC",
    f"{GROUP} custom_all_reduce_v2.py:_init_workspace all_reduce.py:__init__ compile.py:load_jit": (
        "compiling the custom all-reduce"
    ),
    "load_model_utils.py:load_model distributed_c10d.py:monitored_barrier": "loaded weights",
    f"{WORKSPACE} flashinfer_comm_fusion.py:_preflight_check_workspace_memory distributed_c10d.py:all_reduce": (
        "FlashInfer's workspace, vote"
    ),
    f"{EXCHANGE} mnnvl.py:allgather mnnvl.py:barrier distributed_c10d.py:barrier": (
        "FlashInfer's workspace, first NCCL barrier"
    ),
    f"{EXCHANGE} mnnvl.py:allgather mnnvl.py:recv_fd": "FlashInfer's workspace, handles",
    f"{EXCHANGE}": "FlashInfer's workspace, mapping",
    f"{WORKSPACE} trtllm_mnnvl_ar.py:__init__ mnnvl.py:_setup_multicast": "FlashInfer's workspace, multicast",
    f"{FUSION} trtllm_ar.py:trtllm_lamport_initialize core.py:build_and_load _api.py:acquire": (
        "compiling FlashInfer's all-reduce"
    ),
    f"{FUSION} __init__.py:synchronize": "FlashInfer's workspace, clearing",
    "flashinfer_comm_fusion.py:ensure_workspace_initialized "
    "flashinfer_comm_fusion.py:_sync_allreduce_unavailable_across_tp distributed_c10d.py:all_reduce": (
        "FlashInfer's workspace, agreement"
    ),
    "base_runner.py:warmup base_runner.py:_flashinfer_autotune autotuner.py:choose_one": "FlashInfer's autotuning",
    "decode_cuda_graph_runner.py:capture decode_cuda_graph_runner.py:_capture_one_stream "
    "full_cuda_graph_backend.py:capture_one distributed_c10d.py:barrier": "graph capture",
    "parallel_state.py:graph_capture custom_all_reduce_v2.py:_register_graph_inputs "
    "distributed_c10d.py:all_gather_object": "handles of captured buffers",
    "hooks.py:init_group attach.py:attach preflight.py:run exchange.py:gather": "all-reduce preflight",
}


def printed(stack: str, dump: bool = False) -> list[str]:
    """The lines that ``traceback`` prints of a stack, or ``faulthandler`` (most recent call first, no comma)."""
    frames = [frame.split(":") for frame in stack.split()]
    if dump:
        lines = [f'  File "/site/sglang/x/{file}", line 7 in {name}' for file, name in reversed(frames)]
        return ["Thread 0x00007f (most recent call first):", *lines]
    return [f'  File "/site/sglang/x/{file}", line 7, in {name}\n    code()' for file, name in frames]


@pytest.mark.parametrize("stack", STACKS)
def test_every_place_is_told_by_its_stack(stack: str) -> None:
    found = start_places.identify(printed(stack))
    assert found is not None and found.name == STACKS[stack]
    (dumped,) = start_places.of_dump("\n".join(printed(stack, dump=True)))
    assert start_places.identify(dumped) == found
    said = slow.diagnose(printed(stack), ["python"])
    assert found.waits_for in said and found.switch in said


def test_all_places_are_tried_and_differ() -> None:
    assert sorted(STACKS.values()) == sorted(place.name for place in start_places.PLACES)
    assert len({place.signs for place in start_places.PLACES}) == len(start_places.PLACES)


def test_upstream_still_has_the_functions_that_tell_a_place() -> None:
    """Of upstream's own files; torch and FlashInfer are other packages."""
    import sglang

    root = Path(str(sglang.__file__)).parent
    elsewhere = {"mnnvl.py", "preflight.py"}
    others = {
        "init_process_group", "new_group", "monitored_barrier", "barrier", "synchronize", "recv_fd",
        "build_and_load", "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    }  # fmt: skip
    text = "\n".join(
        file.read_text(encoding="utf-8")
        for folder in ("srt/distributed", "srt/layers", "srt/model_executor", "kernels/jit")
        for file in (root / folder).rglob("*.py")
    )
    for place in start_places.PLACES:
        for sign in place.signs:
            file, _, function = sign.rpartition(":")
            if file not in elsewhere and function not in others:
                assert re.search(rf"def {function}\b", text), sign


@pytest.mark.parametrize(
    ("stack", "programs", "expected"),
    [
        (
            "a.py:build_and_load b.py:communicate",
            ["python", "ninja", "cicc"],
            "compiler is at work (ninja, cicc)",
        ),
        ("a.py:f c.py:barrier", [], "waits for the other ranks in a barrier"),
        ("a.py:somewhere", ["python"], "no known sign"),
        ("", [], "no known sign"),
        ("a.py:f c.py:barrier", ["nvcc"], "compiler is at work (nvcc)"),
        # The innermost sign is where it stands; the ones above only led there.
        ("a.py:new_group b.py:gpu_p2p_access_check", [], "peer-access check"),
    ],
)
def test_diagnosis(stack: str, programs: list[str], expected: str) -> None:
    assert expected in slow.diagnose(printed(stack), programs)


def recv_fd(seconds: float, done: Callable[[], object] = lambda: False) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not done():
        time.sleep(0.05)


def test_a_slow_step_names_itself_once(caplog: pytest.LogCaptureFixture) -> None:
    counters.reset()
    with caplog.at_level(logging.WARNING, "sglang.fork"), slow.telling("a workspace", "try that", 0.1):
        recv_fd(60, lambda: caplog.records)
        time.sleep(0.3)  # it is not told again
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert "a workspace has taken 0 s and is not done" in lines[0]
    assert "Unix socket" in lines[0] and "try that" in lines[0] and "in recv_fd" in lines[0]
    assert any(key.startswith("slow_start{") for key in counters.snapshot())


def test_a_quick_step_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING, "sglang.fork"), slow.telling("a workspace", "", 60):
        watching = set(threading.enumerate()) - before
    with pytest.raises(KeyError), slow.telling("a workspace", "", 60):
        watching |= set(threading.enumerate()) - before
        raise KeyError
    assert len(watching) == 2
    for thread in watching:  # gone with its step, long before it would speak
        thread.join(30)
        assert not thread.is_alive()
    assert not caplog.records


def test_descendants_of_a_real_process() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 20 & sleep 20; true"])
    try:
        deadline = time.monotonic() + 60
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


def dumped(*stacks: str) -> str:
    """What ``faulthandler`` writes at a time-out: all threads, the main one last."""
    return (
        "Timeout (0:00:20)!\n" + "\n\n".join("\n".join(printed(stack, dump=True)) for stack in stacks) + "\n"
    )


def test_a_hung_step_says_where_each_rank_stands_and_what_starts_without_it(tmp_path: Path) -> None:
    """Recorded stacks: rank 0 waits for a descriptor that rank 1, in the driver, has not sent yet."""
    handles = next(stack for stack, name in STACKS.items() if name == "FlashInfer's workspace, handles")
    (tmp_path / "0.stacks").write_text(dumped("threading.py:wait", handles))
    (tmp_path / "1.stacks").write_text(dumped("threading.py:wait", EXCHANGE))
    where = start_probe._where(tmp_path)
    assert "rank 0 at FlashInfer's workspace, handles, waits for another rank's memory handle" in where
    assert "rank 1 at FlashInfer's workspace, mapping, waits for the driver" in where
    assert "0.stacks" in where and "1.stacks" in where
    outcomes = [Outcome(BASE, STEP, "hung", detail=where)]
    assert start_probe.cure(outcomes) == f"start with {start_places.NO_FUSION}"
    assert start_probe.cure([*outcomes, Outcome("NCCL_CUMEM_ENABLE=1", STEP, "ok")]).startswith(
        "start with NCCL_CUMEM_ENABLE=1; or start with --enforce"
    )


def test_changes_are_tried_only_up_to_the_step_that_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rounds: list[tuple[str, list[str]]] = []
    third = STEPS[2].name

    def a_round(variant: str, folder: Path, limit_s: float, skip: list[str]) -> list[Outcome]:
        rounds.append((variant, list(skip)))
        state = "hung" if variant == BASE else "ok"
        return [
            Outcome(
                variant, step.name, "skipped" if step.name in skip else state if step.name == third else "ok"
            )
            for step in STEPS
        ]

    monkeypatch.setattr(start_probe, "_round", a_round)
    outcomes = start_probe.probe(None, tmp_path, 1.0, time.monotonic() + 60)
    assert rounds[0] == (BASE, []) and rounds[1] == (BASE, [third])
    later = [step.name for step in STEPS[3:]]
    assert [skip for variant, skip in rounds if variant != BASE] == [later] * (len(start_probe.VARIANTS) - 1)
    assert "passes with NCCL_CUMEM_ENABLE=1" in conclude(outcomes)[0]
    assert start_probe.load(tmp_path / "outcomes.json") == outcomes == start_probe.load(start_probe.last())
    # Nothing wrong: no change is tried. Out of time: nothing is begun, and that is said.
    rounds.clear()
    monkeypatch.setattr(
        start_probe,
        "_round",
        lambda v, *_: rounds.append((v, [])) or [Outcome(v, s.name, "ok") for s in STEPS],
    )
    start_probe.probe(None, tmp_path, 1.0, time.monotonic() + 60)
    assert rounds == [(BASE, [])]
    assert {entry.state for entry in start_probe.probe(None, tmp_path, 1.0, 0.0)} == {"skipped"}


def stands_still(context: Any) -> str:
    if context.rank == 0:
        recv_fd(60)
    return "went on"


def test_a_step_that_really_hangs_is_named_and_the_next_ones_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real processes; rank 0 never comes back from the second step."""
    steps = (
        Step("first", lambda context: "fine"),
        Step("second", stands_still),
        Step("third", lambda context: f"rank {context.rank}"),
    )
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(start_probe.multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr(start_probe, "STEPS", steps)
    # Long enough for a process of a busy machine that stands still inside another step.
    monkeypatch.setattr(start_probe, "GRACE_S", 4.0)
    first, second, third = start_probe.run_variant(BASE, tmp_path, 1.0)
    assert (first.state, second.state, third.state) == ("ok", "hung", "ok")
    assert "rank 0 at FlashInfer's workspace, handles" in second.detail and "0.stacks" in second.detail
    assert third.detail == "rank 0"


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '[{"variant": "x"}]'])
def test_a_probe_file_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "outcomes.json").write_text(text)
    assert start_probe.load(tmp_path / "outcomes.json") == []


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
    (tmp_path / "0.stacks").write_text(dumped("pynccl.py:__init__ streams.py:synchronize"))
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
