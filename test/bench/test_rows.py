"""The results format: what is written is what is read, and what cannot be compared is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.bench_verify.environment import Environment, Rank, capture, kernel_settings, portable, variables
from sglang.bench_verify.gpu import Gpu, Load, _nvlinks
from sglang.bench_verify.rows import Metric, Results, Row, RowError, context_label, is_results_file


def row(**changes: object) -> Row:
    """A valid row, with changes."""
    fields: dict[str, object] = {
        "bench": "slice",
        "machine": "h200",
        "variant": "fork",
        "case": {"context": 65536, "batch": 1, "draft_tokens": 3},
        "metrics": {"cycle_ms": Metric.of([3.0, 3.2, 3.1], "ms")},
    }
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_file_reads_back_as_written(tmp_path: Path) -> None:
    record = Environment(
        taken="2026-02-01T00:00:00",
        gpus=[Gpu(name="NVIDIA H200", pcie_width=16)],
        load=Load(samples=3, sm_clock_mhz=(1980.0,)),
        ranks=[Rank(rank=1, variables={"NCCL_PROTO": "LL"})],
    )
    results = Results(environments=[record])
    results.add(row(phases_ms={"verify": 2.0}, topics_off=("verify-attention",)))
    results.save(tmp_path / "x.json")
    assert Results.load(tmp_path / "x.json") == results
    assert is_results_file(tmp_path / "x.json")


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9))
def test_a_metric_is_the_median_of_its_repeats(samples: list[float]) -> None:
    metric = Metric.of(samples, "ms")
    assert min(samples) <= metric.value <= max(samples)
    assert metric.spread >= 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"variant": "ours"}, "ours"),
        ({"machine": ""}, "machine"),
        ({"metrics": {"cycle_ms": Metric(float("nan"), "ms")}}, "NaN"),
    ],
)
def test_a_row_that_cannot_be_compared_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(RowError, match=said):
        row(**changes)


def test_a_row_without_an_environment_is_refused() -> None:
    with pytest.raises(RowError, match="environment"):
        Results().add(row())


def test_a_foreign_json_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"figures": []}))
    assert not is_results_file(path)
    with pytest.raises(RowError, match=r"other\.json.*schema"):
        Results.load(path)


@pytest.mark.parametrize(
    ("context", "label"),
    [
        (1000, "1k"),
        (1024, "1k"),
        (16000, "16k"),
        (16384, "16k"),
        (65536, "64k"),
        (131072, "128k"),
        (300, "300"),
        (4097, "4k"),
    ],
)
def test_context_labels(context: int, label: str) -> None:
    assert context_label(context) == label


def test_the_record_is_taken_without_a_gpu_and_serialises() -> None:
    record = capture()
    assert record.python and record.cpu_count > 0
    assert Environment.from_json(json.loads(json.dumps(record, default=vars))).python == record.python


def test_paths_ports_and_secrets_stay_out_of_the_record() -> None:
    seen = variables(
        {
            "NCCL_PROTO": "LL",
            "SGLANG_FORK_DISABLE": "verify-stats",
            "HF_TOKEN": "secret",
            "SGLANG_API_KEY": "secret",
            "TRITON_CACHE_DIR": "/somewhere",
            "PATH": "/bin",
            "SGLANG_PORT": "30000",
            "NCCL_GRAPH_MIXING_SUPPORT": "0",
        }
    )
    assert seen == {
        "NCCL_GRAPH_MIXING_SUPPORT": "0",
        "NCCL_PROTO": "LL",
        "SGLANG_FORK_DISABLE": "verify-stats",
    }


def test_kernel_settings_that_reach_a_gpu_are_kept() -> None:
    line = "BOOT_IMAGE=/vmlinuz root=UUID=1 iommu=pt amd_iommu=on pci=noacs quiet secret=1"
    assert kernel_settings(line) == "iommu=pt amd_iommu=on pci=noacs"


def test_machine_folders_stay_out_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable(str(tmp_path / "benchmark" / "x.py")) == "benchmark/x.py"
    assert portable("/usr/lib/somewhere/tool") == "tool"
    assert portable("--context=1") == "--context=1"


def test_active_links_are_counted() -> None:
    status = "GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: NVIDIA H200\n\t Link 0: 26.562 GB/s\n"
    assert _nvlinks(status) == {0: 1, 1: 1}


def test_who_packed_the_tree_knows_its_commit_better_than_a_checkout_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.delenv("SGLANG_FORK_COMMIT", raising=False)
    of_checkout = capture(root=root).commit
    monkeypatch.setenv("SGLANG_FORK_COMMIT", "0123abc")
    assert capture(root=root).commit == "0123abc" != of_checkout
