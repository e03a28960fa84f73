"""The hooks in two and three real processes over upstream's own coordinator and norms, with simulated peers.

With the hooks and without them (``__wrapped__`` is upstream's function) results are equal, and every path reduces.
"""

from __future__ import annotations

import os
import platform
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks

# Imported before ranks are forked: each of them would pay for it again.
import sglang.srt.distributed.parallel_state
import sglang.srt.layers.layernorm  # noqa: F401
import torch

HIDDEN = 64
CPU = torch.device("cpu")


def coordinator(rank: int, size: int, folder: Path, name: str = "tp") -> Any:
    """Upstream's coordinator on a CPU with our communicator over simulated peers."""
    import sglang.srt.distributed.parallel_state as groups
    from sglang.srt.distributed.one_shot import attach, gate, hooks
    from sglang.srt.distributed.one_shot.gate import YES, RankFacts
    from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec
    from sglang.srt.distributed.one_shot.simulated import Fabric, SimulatedKernels

    room = {key: WorkspaceSpec(8, 256) for key in ("eager", "target", "draft")}
    room["preflight"] = WorkspaceSpec(4, 256)

    def opener(group: Any, device: torch.device) -> Any:
        return SimulatedKernels(Fabric(size, room, folder / "fabric"), rank)

    def facts_of(device: torch.device) -> RankFacts:
        from sglang.srt.distributed.one_shot import settings

        return RankFacts(platform.node(), f"0000:{rank:02x}:00.0", "cpu", (9, 0), settings.mode(), 0)

    gate.group = lambda *_: YES
    hooks.attaching.attach = partial(  # type: ignore[assignment]
        attach.attach, opener=opener, look=dict, facts_of=facts_of
    )
    return groups.GroupCoordinator(
        group_ranks=[list(range(size))],
        local_rank=rank,
        torch_distributed_backend="gloo",
        use_pynccl=False,
        use_pymscclpp=False,
        use_custom_allreduce=False,
        use_torch_symm_mem_all_reduce=False,
        use_hpu_communicator=False,
        use_xpu_communicator=False,
        use_npu_communicator=False,
        group_name=name,
    )


def values(rank: int, rows: int, dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN) -> torch.Tensor:
    """Small integers, so that any order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(100 * rank + rows)
    return torch.randint(-8, 9, (rows, hidden), generator=generator).to(dtype)


def plain(rank: int, size: int, folder: Path) -> list[Any]:
    group = coordinator(rank, size, folder)
    stock = type(group).all_reduce.__wrapped__
    calls = group._one_shot_communicator.calls
    rows_served = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        for rows in (1, 2, 3, 7, 8, 9, 24):
            x = values(rank, rows, dtype)
            before = sum(calls.values())
            mine = group.all_reduce(x.clone())
            if sum(calls.values()) > before:
                rows_served.append((str(dtype), rows))
            assert torch.equal(mine, stock(group, x.clone())), (dtype, rows)
    for x in (values(rank, 8)[:, ::2], values(rank, 4).t(), values(rank, 2)[:0], values(rank, 3, hidden=60)):
        assert torch.equal(
            group.all_reduce(x.clone(memory_format=torch.preserve_format)), stock(group, x.clone())
        )
    shifted = values(rank, 3).view(-1)[1 : 1 + HIDDEN]  # two bytes off: copied, not refused
    before = sum(calls.values())
    assert torch.equal(group.all_reduce(shifted), stock(group, shifted.clone()))
    assert sum(calls.values()) == before + 1
    launches = group._one_shot_communicator.launches()
    assert sum(launches.values()) == sum(calls.values())
    assert {place.rpartition(" ")[0] for place in launches} == {"eager plain"}
    assert {name for _, name in calls} == {
        "one-shot" if os.environ["SGLANG_FORK_ALL_REDUCE_PROTOCOL"] == "auto" else "packets"
    }
    return rows_served


@pytest.mark.parametrize("protocol", ["auto", "packets"])
@pytest.mark.parametrize("size", [2, 3])
def test_plain_reductions_equal_upstreams(
    size: int, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE", "force")
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE_PROTOCOL", protocol)
    outcomes, _ = ranks.run(plain, size, tmp_path)
    served = [(dtype, rows) for dtype in ("torch.bfloat16", "torch.float16") for rows in (1, 2, 3, 7, 8)]
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
        assert [tuple(entry) for entry in outcome.value] == served


def fused(rank: int, size: int, folder: Path) -> dict[str, Any]:
    from sglang.fork import fallbacks
    from sglang.srt.distributed.one_shot import hooks
    from sglang.srt.layers import layernorm
    from sglang.srt.layers.layernorm import RMSNorm

    group = coordinator(rank, size, folder)
    communicator = group._one_shot_communicator
    hooks._norm_group = lambda attention: group
    upstream = layernorm._forward_with_allreduce_fusion
    results = {}
    norm = RMSNorm(HIDDEN, eps=1e-6).to(torch.bfloat16)
    norm.weight.data = values(5, 1).view(-1) / 8
    with torch.no_grad():
        for name, rows, change in (
            ("fused", 3, {}),
            ("too many rows", 9, {}),
            ("part of a row", 3, {"variance_size_override": 32}),
            ("rounds early", 3, {"cast_x_before_out_mul": True}),
            ("post addition", 2, {}),
        ):
            for key, value in {
                "variance_size_override": None,
                "cast_x_before_out_mul": False,
                **change,
            }.items():
                setattr(norm, key, value)
            x, residual = values(rank, rows), values(7, rows)
            post = values(8, rows) if name == "post addition" else None
            kept = residual.clone()
            before = communicator.calls["fused", "one-shot"]
            normed, after = upstream(norm, x, residual, post, norm.weight)
            used = communicator.calls["fused", "one-shot"] - before
            total = sum(values(other, rows).float() for other in range(size)) + kept.float()
            total = total if post is None else total + post.float()
            assert torch.equal(residual, kept), f"{name}: a captured hidden state would change"
            assert torch.equal(after.float(), total), name
            if not change:
                scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
                wanted = total * scale * norm.weight.float()
                torch.testing.assert_close(normed.float(), wanted, rtol=2**-7, atol=2**-7)
            results[name] = used
    results["counted"] = fallbacks.snapshot().get("one-shot-all-reduce", {})
    return results


def test_the_fused_norm_reduces_on_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE", "force")
    outcomes, _ = ranks.run(fused, 2, tmp_path)
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
        used = outcome.value
        assert (used["fused"], used["post addition"]) == (1, 1)
        assert (used["too many rows"], used["part of a row"], used["rounds early"]) == (0, 0, 0)
        assert "fused norm: the norm takes part of a row" in used["counted"]
        assert "fused norm: the norm rounds before its weight" in used["counted"]


def refused(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Upstream's own fused kernel gives (None, None) after the reduction was left to it."""
    from sglang.fork import fallbacks
    from sglang.srt.distributed.one_shot import hooks
    from sglang.srt.layers import flashinfer_comm_fusion, layernorm
    from sglang.srt.layers.layernorm import RMSNorm

    group = coordinator(rank, size, folder)
    group._one_shot_communicator = None
    hooks._norm_group = lambda attention: group
    parallel = type("Parallel", (), {"attn_tp_size": size, "moe_ep_size": 1, "moe_tp_size": size})()
    layernorm.get_parallel = lambda: parallel
    flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm = lambda **_: (None, None)
    norm = RMSNorm(HIDDEN, eps=1e-6).to(torch.bfloat16)
    x, residual = values(rank, 3), values(7, 3)
    with torch.no_grad():
        unpatched = norm.forward(x.clone(), residual.clone())[1]
        normed, after = layernorm._forward_with_allreduce_fusion(norm, x, residual.clone(), None, norm.weight)
    total = sum(values(other, 3).float() for other in range(size)) + residual.float()
    return {
        "reduced": torch.equal(after.float(), total),
        "normed": torch.allclose(
            normed.float(),
            total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6),
            rtol=2**-7,
            atol=2**-7,
        ),
        "what upstream would have given": torch.equal(unpatched.float(), total),
        "counted": fallbacks.snapshot().get("one-shot-all-reduce", {}),
    }


def test_a_refused_fused_kernel_still_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault injected: without the hook the norm goes on with this rank's part only."""
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE", "force")
    outcomes, _ = ranks.run(refused, 2, tmp_path)
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
        assert outcome.value["reduced"] and outcome.value["normed"]
        assert outcome.value["what upstream would have given"] is False
        assert outcome.value["counted"] == {"upstream's fused kernel refused": 1}


def states(rank: int, size: int, folder: Path, name: str) -> dict[str, Any]:
    from sglang.srt.distributed.one_shot import hooks

    group = coordinator(rank, size, folder, name)
    x = values(rank, 3)
    wanted = sum(values(other, 3).float() for other in range(size))
    return {
        "communicator": getattr(group, "_one_shot_communicator", None) is not None,
        "described": hooks.describe(),
        "right": torch.equal(group.all_reduce(x).float(), wanted),
    }


@pytest.mark.parametrize(
    ("mode", "name", "has", "words"),
    [
        ("force", "tp", True, "one-shot for tp:0"),
        ("off", "tp", False, "switched off"),
        ("auto", "tp", False, "the table leaves all to stock"),
        ("force", "pp", False, "no group of several ranks"),
    ],
)
def test_modes(
    mode: str, name: str, has: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE", mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcomes, _ = ranks.run(states, 2, tmp_path, name)
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
        assert outcome.value["communicator"] is has
        assert outcome.value["right"]
        assert words in " ".join(f"{key} {value}" for key, value in outcome.value["described"])


def test_a_bad_mode_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE", "on")
    outcomes, _ = ranks.run(states, 2, tmp_path, "tp")
    assert all(
        "SGLANG_FORK_ALL_REDUCE=on is none of auto, force, off, simulate" in outcome.error
        for outcome in outcomes
    )


def one_rank(rank: int, size: int, folder: Path) -> bool:
    from sglang.srt.distributed.one_shot import hooks

    group = coordinator(0, 1, folder)
    return hasattr(group, "_one_shot_communicator") or bool(hooks.watches)


def test_one_rank_is_left_alone(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(one_rank, 1, tmp_path)
    assert outcomes[0].value is False, outcomes[0].output


def on_cpu(rank: int, size: int, folder: Path) -> list[Any]:
    import sglang.srt.distributed.parallel_state as groups
    from sglang.srt.distributed.one_shot import gate, hooks

    real = gate.group
    group = coordinator(rank, size, folder, "pp")  # the helper's gate says yes to all
    gate.group = real
    groups.GroupCoordinator([list(range(size))], rank, "gloo", *[False] * 7, group_name="tp")
    del group
    return [hooks.describe(), len(hooks.watches)]


def test_a_cpu_group_is_watched_but_never_given_kernels(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(on_cpu, 2, tmp_path)
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
        described, watched = outcome.value
        assert "no GPU" in described[0][1]
        assert watched == 1


def without_a_shared_folder(rank: int, size: int, folder: Path) -> list[Any]:
    """Rank 1 is in a container of its own that has the same name: it does not see rank 0's folder."""
    from sglang.fork import fallbacks
    from sglang.srt.distributed.one_shot import hooks

    if rank == 1:
        hooks.Path = lambda place: Path(place) / "elsewhere"  # type: ignore[assignment,misc]
    group = coordinator(rank, size, folder)
    right = torch.equal(
        group.all_reduce(values(rank, 3)).float(), sum(values(other, 3).float() for other in range(size))
    )
    return [len(hooks.watches), right, fallbacks.snapshot().get("one-shot-all-reduce", {})]


def test_ranks_without_a_shared_folder_start_without_a_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE", "force")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    outcomes, _ = ranks.run(without_a_shared_folder, 2, tmp_path)
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
        assert outcome.value == [0, True, {"no rank watch": 1}]
    assert not list(tmp_path.glob("sglang-ranks-*"))


def test_where_no_temporary_folder_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed.one_shot import hooks

    asked: list[Any] = []

    def refuse(prefix: str, dir: str | None) -> str:
        asked.append(dir)
        raise FileNotFoundError(f"no usable temporary directory ({dir})")

    monkeypatch.setattr(hooks.tempfile, "mkdtemp", refuse)
    assert hooks._shared_folder() == ["", "no usable temporary directory (None)"]
    assert asked == [None, "/dev/shm"]


def test_capture_names_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed.one_shot import capture, hooks

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capture.workspace(gpu) == "target"
    assert capture.workspace(CPU) == "eager"
    for draft, name in ((True, "draft"), (False, "target")):
        runner = type("Runner", (), {"model_runner": type("Model", (), {"is_draft_worker": draft})()})()
        assert hooks.capture_graphs(lambda self: capture.workspace(gpu), runner) == name
    assert capture.workspace(gpu) == "target"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert capture.workspace(gpu) == "eager"


def test_upstreams_capture_still_has_the_seams() -> None:
    """Draft runners inherit ``capture`` and ``_capture_one_stream``; one of their own would pass us by."""
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    for runner in (EAGLEDraftCudaGraphRunner, EAGLEDraftExtendCudaGraphRunner):
        assert "capture" not in vars(runner) and "_capture_one_stream" not in vars(runner)
        assert hasattr(runner.capture, "__wrapped__")


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"enforce_disable_flashinfer_allreduce_fusion": True}, True),  # FlashInfer's, which ours is not
        ({"enable_deterministic_inference": True}, False),
        ({"architecture": "LlamaForCausalLM"}, False),
    ],
)
def test_which_servers_leave_a_reduction_to_the_next_norm(
    change: dict[str, Any], may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.layers.dp_attention as dp
    import sglang.srt.layers.moe as moe
    import sglang.srt.server_args as server_args
    from sglang.srt.distributed.one_shot import hooks

    found = {
        "enforce_disable_flashinfer_allreduce_fusion": False,
        "enable_deterministic_inference": False,
        "architecture": "DeepseekV3ForCausalLM",
        **change,
    }
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[found.pop("architecture")]))
    arguments = SimpleNamespace(**found, get_model_config=lambda: model)
    monkeypatch.setattr(server_args, "get_global_server_args", lambda: arguments)
    monkeypatch.setattr(dp, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(moe, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: True))
    assert hooks._may_defer() is may


@pytest.mark.parametrize(
    ("enabled", "mine", "seen"), [(None, None, "0"), ("1", None, None), (None, "20", "20"), ("1", "20", "20")]
)
def test_a_server_that_goes_down_waits_only_for_dumps_that_can_come(
    enabled: str | None, mine: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's minute would keep the port open after a rank died; 30 s are allowed."""
    import os

    from sglang.srt.distributed.one_shot import hooks

    for name, value in (("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", enabled), (hooks.DUMP_WAIT, mine)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert hooks.crash_dump(lambda self: os.environ.get(hooks.DUMP_WAIT), None) == seen


def test_the_servers_state_names_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from sglang.srt.distributed.one_shot import attach, hooks

    monkeypatch.setattr(
        hooks, "states", {"tp:0": attach.State("tp:0", None, "no GPU", "cpu has no such kernel")}
    )
    output = type("Output", (), {"internal_state": {"mine": 1}})()
    found = hooks.internal_state(lambda self: output, None).internal_state
    json.dumps(found)
    assert found["mine"] == 1
    assert found["one_shot_all_reduce"]["tp:0"]["ours"] is False
    assert found["one_shot_all_reduce"]["tp:0"]["launches"] == {}
    assert "no GPU" in found["one_shot_all_reduce"]["tp:0"]["lines"][0][1]


def test_what_packets_have_no_room_for_is_sent_with_flags() -> None:
    """By bytes, which all ranks share; a table that was measured never asks for it, a forced protocol does."""
    from sglang.srt.distributed.one_shot.communicator import Communicator
    from sglang.srt.distributed.one_shot.policy import (
        FUSED,
        ONE_SHOT,
        PACKETS,
        PLAIN,
        STOCK,
        Key,
        forced,
        with_protocol,
    )
    from sglang.srt.distributed.one_shot.simulated import Fabric, SimulatedKernels

    table = with_protocol(forced(Key("any", "NV", 8, "")), PACKETS)
    communicator = Communicator(SimulatedKernels(Fabric(8), 0), table, torch.device("cpu"))
    methods = {
        rows: communicator.choose(kind, rows, 7168, torch.bfloat16).method
        for kind in (PLAIN, FUSED)
        for rows in (1, 10, 11, 64, 65)
    }
    assert methods == {1: PACKETS, 10: PACKETS, 11: ONE_SHOT, 64: ONE_SHOT, 65: STOCK}
    assert "too large for packets" in communicator.choose(PLAIN, 11, 7168, torch.bfloat16).reason
