"""The slice's A/B without a GPU: engine names, and runs over engines that answer from a table."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from sglang.bench_verify.slice.engines import EngineError

FILE = Path(__file__).resolve().parents[2] / "benchmark" / "slice_ab.py"


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("slice_ab", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules["slice_ab"] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["slice_ab"]


def test_engines_with_a_variable_of_their_own(bench: ModuleType) -> None:
    found = bench.specifications(
        ["fork-eagle3-with-SGLANG_A_SETTING=96", "fork-eagle3-no-cycle-graph", "fork-decode"], 2.0
    )
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        bench.specifications(["fork-eagle3-with-NAME"], 2.0)
    assert [dict(item.environment) for item in found] == [{"SGLANG_A_SETTING": "96"}, {}, {}]
    assert [item.topics_off for item in found] == [(), ("cycle-graph",), ()]
    assert [item.steps for item in found] == [2, 2, 0]


def test_upstreams_cycles_are_few_at_long_contexts_and_none_beyond(bench: ModuleType) -> None:
    names = ["upstream-decode", "upstream-eagle3", "fork-eagle3"]
    found = bench.cases([1024, 131072, 262144], names, 128, "fork-eagle3@1024")
    assert [case.tokens for case in found] == [
        {"upstream-decode": 128, "upstream-eagle3": 128},
        {"upstream-decode": 128, "upstream-eagle3": bench.SLOW_TOKENS, "fork-eagle3": 128},
        {"upstream-decode": 128, "fork-eagle3": 128},
    ]


class FakeEngine:
    startup_s = 60.0

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def state(self) -> dict[str, Any]:
        return {"counters": {"x": 1}}

    def experts_per_layer(self, tokens: int) -> None:
        return None


class FakeFleet:
    """Notes which engines are up, and fails where told."""

    log: ClassVar[list[str]] = []
    broken: ClassVar[str] = ""

    def __init__(self, shape: Any, specs: list[Any], folder: Path, options: Any) -> None:
        self.shape, self.options = shape, options
        self.engines = {spec.name: FakeEngine(spec) for spec in specs if spec.name != self.broken}
        self.failures = {spec.name: "no memory" for spec in specs if spec.name == self.broken}

    def __enter__(self) -> FakeFleet:
        self.log.append("up " + " ".join(self.engines))
        return self

    def __exit__(self, *unused: Any) -> None:
        self.log.append("down")

    def measure(self, name: str, context: int, batch: int = 1, tokens: int = 128) -> dict[str, Any]:
        if context == 4096:
            raise EngineError("disturbed")
        self.log.append(f"{name} {context}")
        return {"ms_per_token": 8.0, "ms_per_cycle": 10.0, "phases": {}, "kept_length": 2.0}


def run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str, broken: str = ""
) -> tuple[int, list[str], Any]:
    """Status, what the fleets did without warm-ups, and the rows."""
    monkeypatch.setattr(bench, "Fleet", FakeFleet)
    monkeypatch.setattr(FakeFleet, "log", [])
    monkeypatch.setattr(FakeFleet, "broken", broken)
    status = bench.main(
        ["--engines", "fork-decode,fork-eagle3", "--contexts", "1k,16k", "--layers", "61", "--rounds", "1",
         "--profile-context", "0", "--out", str(out), *more]
    )  # fmt: skip
    log = [line for line in FakeFleet.log if not line.endswith(f" {bench.WARM_CONTEXT}")]
    return status, log, json.loads(out.read_text(encoding="utf-8"))["rows"]


def test_engines_that_do_not_fit_together_run_apart(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, log, rows = run(bench, monkeypatch, tmp_path / "rows.json", "--one-at-a-time")
    assert status == 0
    assert log == [
        "up fork-decode", "fork-decode 1024", "fork-decode 16384", "down",
        "up fork-eagle3", "fork-eagle3 1024", "fork-eagle3 16384", "down",
    ]  # fmt: skip
    assert [(row["case"]["engine"], row["case"]["context"]) for row in rows] == [
        ("fork-decode", 1024), ("fork-decode", 16384), ("fork-eagle3", 1024), ("fork-eagle3", 16384),
    ]  # fmt: skip
    assert {row["note"] for row in rows} == {bench.APART}
    assert {row["case"]["layers"] for row in rows} == {61} and rows[0]["counters"]["count.x"] == 1


def test_without_the_flag_they_share_the_gpu(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, log, rows = run(bench, monkeypatch, tmp_path / "rows.json")
    assert log[0] == "up fork-decode fork-eagle3" and log.count("down") == 1
    assert [row["case"]["context"] for row in rows] == [1024, 1024, 16384, 16384]
    assert {row.get("note", "") for row in rows} == {""}


def test_an_engine_that_does_not_start_leaves_the_others_their_rows(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    status, log, rows = run(bench, monkeypatch, out, "--one-at-a-time", broken="fork-decode")
    assert status == 1 and "FAILED fork-decode: no memory" in capsys.readouterr().err
    assert log[:2] == ["up ", "down"] and [row["case"]["engine"] for row in rows] == ["fork-eagle3"] * 2


def test_a_run_cut_short_leaves_what_was_measured(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine's start is interrupted, as a time limit does."""
    enter = FakeFleet.__enter__

    def interrupted(self: FakeFleet) -> FakeFleet:
        if "fork-eagle3" in self.engines:
            raise KeyboardInterrupt
        return enter(self)

    monkeypatch.setattr(FakeFleet, "__enter__", interrupted)
    out = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        run(bench, monkeypatch, out, "--one-at-a-time")
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["case"]["engine"] for row in rows] == ["fork-decode"] * 2
    assert {row["note"] for row in rows} == {bench.APART}


def test_rows_say_who_reduced(bench: ModuleType) -> None:
    ours = {
        "ours": True,
        "reason": "",
        "launches": {"target fused packets": 24, "draft plain packets": 4},
        "lines": [
            ["kernels", "x"],
            ["table", "measured here"],
            ["plain", "packets up to 86016 bytes, stock above"],
        ],
    }
    assert bench.reductions({"all_reduce": {"tp:0": ours}}) == {
        "all_reduce.tp:0 target fused packets": 24,
        "all_reduce.tp:0 draft plain packets": 4,
        "all_reduce.tp:0 table": "measured here",
        "all_reduce.tp:0 plain": "packets up to 86016 bytes, stock above",
    }
    stock = {"ours": False, "reason": "the table leaves all to stock", "launches": {}, "lines": []}
    assert bench.reductions({"all_reduce": {"tp:0": stock}}) == {
        "all_reduce.tp:0 stock": "the table leaves all to stock"
    }
    assert bench.reductions({}) == {}  # one rank, or upstream's engines
