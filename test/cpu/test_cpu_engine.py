"""When the CPU engine is chosen, and what the launcher fills in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.cpu_engine import bootstrap, defaults, portable
from sglang.srt.cpu_engine.detect import Finding, find_accelerator


def machine(root: Path, *nodes: str) -> Path:
    """A file system with these device nodes."""
    for node in nodes:
        (root / node).parent.mkdir(parents=True, exist_ok=True)
        (root / node).touch()
    return root


@pytest.mark.parametrize(
    ("nodes", "environment", "build", "found", "reason"),
    [
        ((), {}, "", False, "no accelerator driver"),
        (("dev/nvidiactl",), {}, "", True, "NVIDIA driver"),
        (("dev/nvidiactl",), {"CUDA_VISIBLE_DEVICES": ""}, "", False, "hides every GPU"),
        (("dev/nvidiactl",), {"CUDA_VISIBLE_DEVICES": "-1"}, "", False, "hides every GPU"),
        (("dev/nvidiactl",), {"CUDA_VISIBLE_DEVICES": "0"}, "", True, "NVIDIA driver"),
        (("dev/nvidiactl", "dev/kfd"), {"CUDA_VISIBLE_DEVICES": ""}, "", True, "ROCm"),
        (("dev/nvidiactl",), {}, "cpu", False, "torch +cpu"),
        (("dev/nvidiactl",), {}, "cu130", True, "NVIDIA driver"),
        (("dev/dxg",), {}, "", True, "Windows"),
        (("dev/davinci_manager",), {}, "", True, "Ascend"),
        (("dev/dri/renderD128",), {}, "cu130", False, "no accelerator"),
        (("dev/dri/renderD128",), {}, "xpu", True, "xpu"),
    ],
)
def test_detection(
    tmp_path: Path,
    nodes: tuple[str, ...],
    environment: dict[str, str],
    build: str,
    found: bool,
    reason: str,
) -> None:
    finding = find_accelerator(environment, machine(tmp_path, *nodes), build)
    assert finding.found is found
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("variable", "found", "chosen"),
    [(None, False, "1"), ("1", False, "1"), ("0", False, "0"), (None, True, None), ("1", True, "1")],
)
def test_the_engine_is_chosen_only_where_nothing_speaks_against_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, found: bool, chosen: str | None
) -> None:
    monkeypatch.setattr(bootstrap, "find_accelerator", lambda: Finding(found, "test"))
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "Portable" not in type(f).__name__])
    if variable is None:
        monkeypatch.delenv(bootstrap.ENGINE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(bootstrap.ENGINE_VARIABLE, variable)
    bootstrap.prepare()
    assert bootstrap.os.environ.get(bootstrap.ENGINE_VARIABLE) == chosen
    installed = any(isinstance(finder, portable.PortableKernelFinder) for finder in sys.meta_path)
    assert installed == (chosen == "1" and not found)


@pytest.mark.parametrize(
    ("argv", "original", "server"),
    [
        (["-m"], ["python", "-m", "sglang.launch_server", "--port", "1"], True),
        (["-m"], ["python", "-m", "pytest"], False),
        (["/usr/bin/sglang", "serve"], ["python", "/usr/bin/sglang", "serve"], True),
        (["-c", "--multiprocessing-fork"], ["python", "-c", "...", "--multiprocessing-fork"], True),
        (["client.py"], ["python", "client.py"], False),
    ],
)
def test_who_counts_as_a_server(argv: list[str], original: list[str], server: bool) -> None:
    assert bootstrap.launched_as_server(argv, original) is server


def test_the_environment_is_filled_in_and_nothing_is_overridden() -> None:
    environment = {"OMP_NUM_THREADS": "7", "PYTHONDONTWRITEBYTECODE": "1"}
    done = defaults.environment_defaults(environment, compile_wanted=False, cpus=8)
    assert environment == {
        "OMP_NUM_THREADS": "7",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    assert len(done) == 3
    asked = {}
    defaults.environment_defaults(asked, compile_wanted=True, cpus=1)
    assert asked == {"OMP_NUM_THREADS": "1"}


def test_several_ranks_get_the_cpus_that_upstream_asks_for() -> None:
    """Upstream ends with an assertion where there are more ranks than memory nodes and the variable is not set."""
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    for ranks, nodes, which, wanted in (
        (2, 1, (0, 1), "0|1"),
        (2, 1, (3, 1, 7, 5, 9), "1,3|5,7,9"),
        (3, 1, (4,), "4|4|4"),
        (2, 2, (0, 1), None),
        (1, 1, (0, 1), None),
    ):
        environment: dict[str, str] = {}
        done = defaults.environment_defaults(
            environment, compile_wanted=True, cpus=len(which), ranks=ranks, nodes=nodes, which=which
        )
        assert environment.get(name) == wanted
        assert (f"{name}={wanted}" in done) is (wanted is not None)
    mine = {name: "2|3"}
    defaults.environment_defaults(mine, compile_wanted=True, cpus=2, ranks=2, nodes=1, which=(0, 1))
    assert mine[name] == "2|3"


def test_memory_nodes_are_counted(tmp_path: Path) -> None:
    assert defaults.numa_nodes(tmp_path / "none") == 1
    for entry in ("node0", "node1", "possible"):
        (tmp_path / entry).mkdir()
    assert defaults.numa_nodes(tmp_path) == 2


@pytest.mark.parametrize("on_cpu", [True, False])
def test_ranks_on_a_cpu_get_no_nccl_communicator(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """Upstream's own factory, patched: what it hands to the coordinator."""
    import sglang.srt.distributed.parallel_state as groups
    import sglang.srt.utils as utilities

    monkeypatch.setattr(utilities, "is_cpu", lambda: on_cpu)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(groups, "GroupCoordinator", lambda **given: seen.update(given))
    groups.init_model_parallel_group([[0, 1]], 0, "gloo", group_name="tp")
    assert seen["use_pynccl"] is not on_cpu
    assert seen["use_custom_allreduce"] is (False if on_cpu else groups._ENABLE_CUSTOM_ALL_REDUCE)
    assert seen["group_name"] == "tp"


def test_the_pool_holds_one_context_at_least(tmp_path: Path) -> None:
    assert defaults.pool_tokens(str(tmp_path), None) == defaults.POOL_TOKENS
    assert defaults.pool_tokens("organisation/name", None) == defaults.POOL_TOKENS
    assert defaults.pool_tokens("organisation/name", 100_000) == 100_000
    for config in ({"max_position_embeddings": 50_000}, {"text_config": {"max_position_embeddings": 50_000}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert defaults.pool_tokens(str(tmp_path), None) == 50_000


@pytest.mark.parametrize(("device", "tokens"), [("cuda", None), ("cpu", defaults.POOL_TOKENS)])
def test_server_arguments_of_other_devices_are_left_alone(device: str, tokens: int | None) -> None:
    args = SimpleNamespace(device=None, max_total_tokens=None, model_path="none/such", context_length=None)

    def upstream(given: SimpleNamespace) -> None:
        given.device = device

    defaults.server_defaults(upstream, args)
    assert args.max_total_tokens == tokens
    args.max_total_tokens = 5
    defaults.server_defaults(upstream, args)
    assert args.max_total_tokens == 5
