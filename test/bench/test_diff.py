"""`diff` names the planted cause, and ranks it above what cannot have been it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang.bench_verify.__main__ import main
from sglang.bench_verify.diff import compare, render
from sglang.bench_verify.environment import Environment, Rank
from sglang.bench_verify.gpu import Gpu, Load
from sglang.bench_verify.rows import Metric, Results, Row


def environment() -> Environment:
    """A machine like the field report's."""
    return Environment(
        base_version="0.5.17",
        fork_version="0.5.17+verify.1",
        topics={"verify-attention": "applied", "verify-stats": "applied", "run-semantics": "applied"},
        packages={"torch": "2.11.0", "triton": "3.6.0"},
        cuda="13.0",
        nccl_version="2.28.9",
        kernel_command_line="iommu=pt",
        uptime_s=9000.0,
        gpus=[Gpu(name="NVIDIA RTX PRO 6000", driver="595.1", pcie_generation=5, pcie_width=16)] * 8,
        load=Load(samples=20, sm_clock_mhz=(2320.0,) * 8, power_w=(231.0,) * 8, pcie_width=(16.0,) * 8),
        variables={"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"},
        ranks=[Rank(rank=0, nccl_version="2.28.9", variables={"NCCL_PROTO": "LL"})],
        server_arguments={"tp_size": "8", "attention_backend": "triton"},
    )


def results(record: Environment, verify_ms: float, **changes: object) -> Results:
    """One row whose verify took ``verify_ms``."""
    found = Results(environments=[record])
    fields: dict[str, object] = {
        "bench": "launch",
        "machine": "rtxpro6000x8",
        "variant": "fork",
        "case": {"context": 32, "batch": 1, "draft_tokens": 3},
        "metrics": {"tok_s": Metric.of([2.0 / verify_ms * 1000], "tok/s")},
        "phases_ms": {"verify": verify_ms, "draft": 1.0},
    }
    found.add(Row(**{**fields, **changes}))  # type: ignore[arg-type]
    return found


Change = Callable[[Environment], None]


def change(name: str) -> Change:
    """A planted regression by name."""

    def topic(record: Environment) -> None:
        record.topics["verify-attention"] = "off"

    def variable(record: Environment) -> None:
        record.variables["NCCL_PROTO"] = "Simple"

    def rank(record: Environment) -> None:
        record.ranks = [Rank(rank=0, nccl_version="2.28.9", variables={})]

    def width(record: Environment) -> None:
        record.load = dataclasses.replace(record.load, pcie_width=(16.0,) * 7 + (8.0,))

    def clock(record: Environment) -> None:
        record.load = dataclasses.replace(record.load, sm_clock_mhz=(1900.0,) * 8)

    def iommu(record: Environment) -> None:
        record.kernel_command_line = "iommu=on"

    def driver(record: Environment) -> None:
        record.gpus = [dataclasses.replace(gpu, driver="580.2") for gpu in record.gpus]

    return {
        "topic": topic,
        "variable": variable,
        "rank": rank,
        "width": width,
        "clock": clock,
        "iommu": iommu,
        "driver": driver,
    }[name]


CASES = [
    ("topic", "topic.verify-attention"),
    ("variable", "variable.NCCL_PROTO"),
    ("rank", "rank.NCCL_PROTO"),
    ("width", "load.pcie_width"),
    ("clock", "load.sm_clock_mhz"),
    ("iommu", "kernel_command_line.iommu"),
    ("driver", "gpu.driver"),
]


@pytest.mark.parametrize(("planted", "name"), CASES)
def test_a_planted_regression_is_the_suspect(planted: str, name: str) -> None:
    worse = environment()
    worse.uptime_s = 100.0  # a reboot beside it, which is no cause
    change(planted)(worse)
    report = compare(results(environment(), 12.0), results(worse, 29.0))
    assert [item.name for item in report.suspects] == [name]
    assert name in render(report).splitlines()[-1]
    assert "uptime_s" in {item.name for item in report.differences}


def test_the_topic_is_ranked_above_the_variable() -> None:
    worse = environment()
    change("topic")(worse)
    change("variable")(worse)
    report = compare(results(environment(), 12.0), results(worse, 29.0))
    assert [item.name for item in report.suspects] == ["topic.verify-attention", "variable.NCCL_PROTO"]


def test_equal_runs_have_no_suspect() -> None:
    report = compare(results(environment(), 12.0), results(environment(), 12.1))
    assert not report.moved and not report.differences
    assert render(report).endswith("no figure moved")


def test_a_difference_that_cannot_reach_the_phase_is_no_suspect() -> None:
    worse = environment()
    change("variable")(worse)
    a, b = results(environment(), 12.0), results(worse, 12.0)
    b.rows[0] = dataclasses.replace(b.rows[0], phases_ms={"verify": 12.0, "draft": 1.0, "host_gap": 3.0})
    a.rows[0] = dataclasses.replace(a.rows[0], phases_ms={"verify": 12.0, "draft": 1.0, "host_gap": 1.0})
    report = compare(a, b)
    assert report.moved and not report.suspects
    assert "nothing recorded explains it" in render(report)


def test_noise_within_the_repeats_is_not_a_regression() -> None:
    noisy = {"tok_s": Metric.of([60.0, 69.0, 75.0], "tok/s")}
    a = results(environment(), 12.0, metrics=noisy)
    b = results(environment(), 12.0, metrics={"tok_s": Metric.of([64.0], "tok/s")})
    assert not compare(a, b).moved


def test_workers_that_said_nothing_are_named_once() -> None:
    silent = environment()
    silent.ranks = []
    report = compare(results(environment(), 12.0), results(silent, 29.0))
    assert [item.name for item in report.suspects] == ["rank.missing"]


def test_a_topic_switched_off_in_the_row_is_named() -> None:
    report = compare(
        results(environment(), 12.0), results(environment(), 29.0, topics_off=("verify-attention",))
    )
    assert report.suspects[0].name == "topic.verify-attention"


def test_fork_and_upstream_files_are_comparable() -> None:
    report = compare(results(environment(), 12.0), results(environment(), 29.0, variant="upstream"))
    assert report.compared == 1


def answers(times: list[float], **changes: object) -> Results:
    """Answers of one server to one prompt, in two starts."""
    found = Results(environments=[environment()])
    for index, verify_ms in enumerate(times):
        case = {"server": "fork", "start": index + 1, "run": 1, "prompt": "p", "batch": 1, "draft_tokens": 3}
        row = results(environment(), verify_ms, case=case, **changes).rows[0]
        found.add(row)
    return found


def test_answers_to_one_prompt_are_repeats() -> None:
    """Two starts that differ by 30% make a difference of 20% between runs noise, and one of 100% none."""
    report = compare(answers([10.0, 13.0]), answers([13.0, 14.5]))
    assert report.compared == 1 and not report.moved
    report = compare(answers([10.0, 13.0]), answers([22.0, 24.0]))
    assert {item.metric for item in report.moved} == {"tok_s", "phase verify"}
    assert "(2 answers)" in report.moved[0].case


def test_nothing_between_ranks_slows_one_rank() -> None:
    single, worse = environment(), environment()
    for record in (single, worse):
        record.server_arguments["tp_size"] = "1"
    change("variable")(worse)
    change("rank")(worse)
    change("topic")(worse)
    report = compare(results(single, 12.0), results(worse, 29.0))
    assert [item.name for item in report.suspects] == ["topic.verify-attention"]
    named = {item.name: item for item in report.differences}
    assert "one rank in both runs" in named["variable.NCCL_PROTO"].why
    assert "rank.NCCL_PROTO" in named and "one rank in both runs" in render(report)


def test_files_without_a_common_case_are_not_called_equal(tmp_path: Path) -> None:
    a, b = results(environment(), 12.0), results(environment(), 12.0, bench="slice")
    assert render(compare(a, b)).endswith("no case is in both files, so nothing was compared")
    a.save(tmp_path / "a.json")
    b.save(tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2


def test_a_link_at_rest_is_not_compared_with_one_that_works() -> None:
    quiet = environment()
    quiet.load = Load()
    report = compare(results(environment(), 12.0), results(quiet, 29.0))
    assert [item.name for item in report.differences] == ["load.missing"]
    assert report.differences[0].weight == 1
