"""The bench of starts without a GPU: its order, what counts as warm, its ratios, and how it ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from sglang.bench_verify.slice.engines import EngineError

from benchmark import start_up as bench

READY = {bench.UPSTREAM: 40.0, bench.SWITCHED: 44.0, bench.UNSWITCHED: 38.0}
CAPTURED = {"target_verify": 3.0, "draft_decode": 1.0, "draft_extend": 1.0}
COUNTERS = {
    bench.UPSTREAM: {},
    bench.SWITCHED: {
        "cycle_graph_capture_seconds": 0.5,
        "cycle_graph_capture_bytes": bench.GIB // 4,
        'graph_capture_seconds{kind="decode"}': 1.0,
        'graph_capture_bytes{kind="decode"}': bench.GIB // 4,
        'graph_capture_seconds{kind="verify"}': 3.0,
    },
    bench.UNSWITCHED: {"cycle_graph_capture_seconds": 0.5, "cycle_graph_capture_bytes": bench.GIB // 4},
}


class Clock:
    """Time that passes only where the stand-ins let it."""

    now: ClassVar[float] = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


class FakeEngine:
    startup_s, import_s = 30.0, 9.0

    def __init__(self, name: str) -> None:
        self.name = name

    def generate(self, context: int, batch: int, tokens: int) -> list[int]:
        assert (batch, tokens) == (1, bench.ANSWER_TOKENS)
        Clock.now += 0.25
        return [tokens]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "counters": dict(COUNTERS[self.name]),
            "graph_capture_s": CAPTURED,
            "memory_usage": {"graph": {"target_verify": 0.5, "draft_decode": 0.5, "decode": 0.0}},
            "startup_time": {"load_weight": 4.0, "kv_cache_allocation": 0.5, "scheduler_e2e": 14.0},
        }
        if self.name in FakeFleet.switch_lost:
            state["counters"] = {}
            state["speculative_auto"] = {"mode": "off", "reason": "no room"}
        return state


class FakeFleet:
    """Notes which engines start; the first start of each takes longer and leaves machine code behind where it is cold."""

    log: ClassVar[list[str]] = []
    cold: ClassVar[set[str]] = set()
    broken: ClassVar[str] = ""
    interrupted_at: ClassVar[int] = 99
    switch_lost: ClassVar[set[str]] = set()
    cache: ClassVar[Path]
    held: ClassVar[float] = 0.0

    def __init__(self, shape: Any, specs: list[Any], folder: Path, options: Any) -> None:
        (self.spec,) = specs
        assert options.random_router is False and self.spec.accept_length is None
        self.engines: dict[str, FakeEngine] = {}
        self.failures: dict[str, str] = {}

    def __enter__(self) -> FakeFleet:
        name = self.spec.name
        if len(self.log) == self.interrupted_at:
            raise KeyboardInterrupt
        FakeFleet.held = 60.0 + (name != bench.UPSTREAM)
        if name == self.broken:
            self.failures[name] = "out of memory"
        else:
            self.engines[name] = FakeEngine(name)
        Clock.now += READY[name]
        if name in self.cold and name not in self.log:
            Clock.now += 100.0
            (self.cache / f"{name}.cubin").touch()
            (self.cache / f"{name}.lock").touch()
        self.log.append(name)
        return self

    def __exit__(self, *unused: Any) -> None:
        Clock.now += 2.0
        FakeFleet.held = 0.0


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "Fleet", FakeFleet)
    clock = SimpleNamespace(monotonic=Clock.monotonic, strftime=time.strftime)
    monkeypatch.setattr(bench, "time", clock)
    monkeypatch.setattr(bench, "device_gib", lambda: FakeFleet.held)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(bench, "cache_folders", lambda: [cache, tmp_path / "absent"])
    for name, value in (
        ("log", []), ("cold", set()), ("broken", ""), ("interrupted_at", 99), ("switch_lost", set()), ("cache", cache),
        ("held", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(FakeFleet, name, value, raising=False)


def run(tmp_path: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Status and the rows by engine."""
    out = tmp_path / "rows.json"
    status = bench.main(["--out", str(out), *more])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["variant"] for row in rows] == sorted(row["variant"] for row in rows), "the fork's first"
    return status, {row["case"]["engine"]: row for row in rows}


def test_ratios_come_first_and_are_of_warm_starts(tmp_path: Path) -> None:
    status, rows = run(tmp_path)
    off, upstream, on = bench.ENGINES
    assert status == 0 and FakeFleet.log == [off, upstream, on, on, upstream, off]
    metrics = rows[bench.SWITCHED]["metrics"]
    assert list(metrics)[:4] == list(bench.RATIOS)
    assert metrics["ready_over_upstream"]["value"] == pytest.approx(44 / 40)
    assert metrics["capture_s"]["value"] == pytest.approx(5 + 0.5 + 1) and metrics["capture_s"]["unit"] == "s"
    assert metrics["capture_over_upstream"]["value"] == pytest.approx(6.5 / 5)
    assert metrics["graphs_gib"] == {"value": 1.5, "unit": "GiB", "samples": [1.5, 1.5]}
    assert metrics["graphs_over_upstream"]["value"] == pytest.approx(1.5)
    assert metrics["device_over_upstream"]["value"] == pytest.approx(61 / 60)
    assert metrics["capture_plain_decode_s"]["value"] == 1.0 and metrics["capture_cycle_s"]["value"] == 0.5
    assert metrics["answer_s"]["value"] == 0.25 and metrics["load_weight_s"]["value"] == 4.0
    parts = {name: metrics[name]["value"] for name in ("import_s", "launch_s", "scheduler_s", "kv_cache_s")}
    assert parts == {"import_s": 9.0, "launch_s": 7.0, "scheduler_s": 14.0, "kv_cache_s": 0.5}
    assert (
        sum(parts[name] for name in ("import_s", "launch_s", "scheduler_s")) == metrics["engine_s"]["value"]
    )
    assert "capture_plain_decode_s" not in rows[bench.UNSWITCHED]["metrics"]
    plain = rows[bench.UPSTREAM]
    assert not any("over" in name for name in plain["metrics"])
    assert plain["metrics"]["ready_s"]["samples"] == [40.0, 40.0]
    for row in rows.values():
        assert row["counters"]["caches"] == "warm" and row["note"].endswith(
            "the first start compiled nothing"
        )
        assert row["counters"]["starts"] == 2 and row["counters"]["compiled"] == "0 0"


def test_a_start_that_compiled_is_left_out_and_said(tmp_path: Path) -> None:
    FakeFleet.cold.add(bench.UPSTREAM)
    status, rows = run(tmp_path)
    upstream = rows[bench.UPSTREAM]
    assert status == 0 and upstream["metrics"]["ready_s"]["samples"] == [40.0]
    assert (
        upstream["counters"]["ready_s of each"] == "140.00 40.00"
        and upstream["counters"]["compiled"] == "1 0"
    )
    assert upstream["note"] == "kernel caches warm: starts that compiled 1 kernels are left out"
    assert rows[bench.SWITCHED]["metrics"]["ready_over_upstream"]["value"] == pytest.approx(44 / 40)


def test_no_ratio_to_a_cold_start(tmp_path: Path) -> None:
    FakeFleet.cold.add(bench.UPSTREAM)
    status, rows = run(tmp_path, "--rounds", "1")
    assert status == 0 and rows[bench.UPSTREAM]["note"].startswith("kernel caches cold")
    assert rows[bench.UPSTREAM]["metrics"]["ready_s"]["value"] == 140.0
    for name in (bench.SWITCHED, bench.UNSWITCHED):
        assert next(iter(rows[name]["metrics"])) == "ready_s"


def test_no_start_begins_that_would_end_behind_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path, "--limit", "220")
    assert status == 0 and len(FakeFleet.log) == 4
    assert {name: row["counters"]["starts"] for name, row in rows.items()} == {
        bench.UNSWITCHED: 1, bench.UPSTREAM: 1, bench.SWITCHED: 2,
    }  # fmt: skip
    assert "ended before start 5" in capsys.readouterr().out


def test_a_start_that_compiled_says_nothing_of_how_long_the_next_one_takes(tmp_path: Path) -> None:
    FakeFleet.cold.add(bench.UPSTREAM)
    status, rows = run(tmp_path, "--limit", "330")
    assert status == 0 and len(FakeFleet.log) == 5
    assert rows[bench.UPSTREAM]["metrics"]["ready_s"]["samples"] == [40.0]


def test_an_interrupt_keeps_the_starts_before_it(tmp_path: Path) -> None:
    FakeFleet.interrupted_at = 2
    status, rows = run(tmp_path)
    assert status == 130 and set(rows) == {bench.UNSWITCHED, bench.UPSTREAM}


def test_an_engine_that_does_not_start_leaves_the_others_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeFleet.broken = bench.UPSTREAM
    status, rows = run(tmp_path)
    assert status == 1 and set(rows) == {bench.SWITCHED, bench.UNSWITCHED}
    assert "FAILED upstream-eagle3: out of memory" in capsys.readouterr().out
    assert not any("over" in name for name in rows[bench.SWITCHED]["metrics"])


def test_a_switch_that_is_off_is_no_start_with_the_switch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeFleet.switch_lost.add(bench.SWITCHED)
    status, rows = run(tmp_path)
    assert status == 1 and bench.SWITCHED not in rows
    assert "no room" in capsys.readouterr().out


def test_the_engines_differ_in_what_is_compared() -> None:
    known = bench.specs()
    assert [spec.draft_tokens for spec in known.values()] == [3, 3, 3]
    assert not known[bench.SWITCHED].arguments and not known[bench.SWITCHED].topics_off
    assert known[bench.UNSWITCHED].arguments == {"speculative_auto": "off"}
    assert known[bench.UPSTREAM].variant == "upstream"
    assert {"cycle-graph", "speculative-auto", "verify-attention"} <= set(known[bench.UPSTREAM].topics_off)
    assert "verify-stats" not in known[bench.UPSTREAM].topics_off, "it reads upstream's own capture times"


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(SystemExit, match="fork-eagle3-auto-of"):
        bench.main(["--engines", "fork-eagle3-auto-of"])


def test_seconds_of_plain_decode_are_not_counted_twice() -> None:
    """An engine without speculation captures decode, and both upstream's workers and the fork count it."""
    found = bench.graph_figures(
        {"graph_capture_s": {"decode": 2.0}, "counters": {'graph_capture_seconds{kind="decode"}': 2.0}}
    )
    assert found == {"capture_decode_s": 2.0, "capture_s": 2.0}


def test_parts_of_a_start_that_the_scheduler_does_not_tell_are_left_out() -> None:
    assert bench.part_figures({}, 30.0, 9.0) == {"import_s": 9.0}


def test_start_says_what_failed(tmp_path: Path) -> None:
    FakeFleet.broken = bench.SWITCHED
    spec = bench.specs()[bench.SWITCHED]
    with pytest.raises(EngineError, match="out of memory"):
        bench.start(None, spec, bench.SliceOptions(random_router=False), tmp_path)
