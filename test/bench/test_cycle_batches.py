"""The bench of batch sizes without a GPU: its ratios, and its run over an engine that answers from a table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from sglang.bench_verify.slice.engines import EngineError

FILE = Path(__file__).resolve().parents[2] / "benchmark" / "cycle_batches.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cycle_batches", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("times", "ratios"),
    [([], []), ([2.0], [None]), ([1.0, 2.0], [0.5, 2.0]), ([1.0, 3.0, 2.0], [1 / 3, 2.0, 2 / 3])],
)
def test_over_neighbours(times: list[float], ratios: list[float | None]) -> None:
    assert load().over_neighbours(times) == pytest.approx(ratios)


class FakeEngine:
    startup_s = 80.0

    def state(self) -> dict[str, Any]:
        return {"counters": {'cycle_graph_replays{batch="1"}': 5, "other": 1}}


class FakeFleet:
    """Batch 2 takes 3 ms and all others 2, but for the second answer of a request, which is disturbed."""

    asked: ClassVar[list[int]] = []
    broken: ClassVar[int] = 0

    def __init__(self, shape: Any, specs: list[Any], folder: str, options: Any) -> None:
        assert options.max_batch == 4 and options.pool_tokens >= 4 * 4096
        self.engines = {spec.name: FakeEngine() for spec in specs}
        self.failures: dict[str, str] = {}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *unused: Any) -> None: ...

    def measure(self, name: str, context: int, batch: int, tokens: int) -> dict[str, Any]:
        if context == 4096:
            if batch == self.broken:
                raise EngineError("no answer")
            self.asked.append(batch)
        slow = 9.0 if self.asked.count(batch) == 2 else 1.0
        return {"ms_per_cycle": (2.0 + (batch == 2)) * slow, "phases": {"verify": 1.5}}


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str, broken: int = 0) -> list[dict[str, Any]]:
    module = load()
    monkeypatch.setattr(module, "Fleet", FakeFleet)
    monkeypatch.setattr(FakeFleet, "asked", [])
    monkeypatch.setattr(FakeFleet, "broken", broken)
    monkeypatch.setattr(sys, "argv", ["cycle_batches.py", "--batches", "4,1,2", "--out", str(out), *more])
    try:
        module.main()
    finally:
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return rows


def test_rows_of_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(monkeypatch, tmp_path / "rows.json")
    assert FakeFleet.asked == [1, 2, 4, 4, 2, 1, 1, 2, 4], "up and down in turn"
    assert [row["case"]["batch"] for row in rows] == [1, 2, 4]
    assert [row["metrics"]["cycle_ms"]["value"] for row in rows] == [2.0, 3.0, 2.0], "medians"
    assert rows[1]["metrics"]["over_neighbours"]["value"] == pytest.approx(1.5)
    assert rows[0]["counters"] == {'cycle_graph_replays{batch="1"}': 5}
    assert "worst over its neighbours 1.5" in capsys.readouterr().out


def test_a_size_that_fails_leaves_the_others_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "rows.json", broken=2)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["case"]["batch"] for row in rows] == [1, 4]
    assert "FAILED batch 2 no answer" in capsys.readouterr().out


def test_no_time_left_measures_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((SystemExit, FileNotFoundError)):
        run(monkeypatch, tmp_path / "rows.json", "--limit", "-1")
    assert not FakeFleet.asked
