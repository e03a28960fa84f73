"""The bench of batch sizes without a GPU: its ratios, and its run over an engine that answers from a table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

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
    def state(self) -> dict[str, Any]:
        return {"counters": {'cycle_graph_replays{batch="1"}': 5, "other": 1}}


class FakeFleet:
    asked: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, shape: Any, specs: list[Any], folder: str, options: Any) -> None:
        assert options.max_batch == 4 and options.pool_tokens >= 4 * 4096
        self.engines = {spec.name: FakeEngine() for spec in specs}
        self.failures: dict[str, str] = {}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *unused: Any) -> None: ...

    def measure(self, name: str, context: int, batch: int, tokens: int) -> dict[str, Any]:
        self.asked.append((context, batch))
        return {"ms_per_cycle": 2.0 + (batch == 2), "phases": {"verify": 1.5}}


def test_rows_of_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load()
    monkeypatch.setattr(module, "Fleet", FakeFleet)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["cycle_batches.py", "--batches", "4,1,2", "--out", str(out)])
    module.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["case"]["batch"] for row in rows] == [1, 2, 4]
    assert rows[1]["metrics"]["over_neighbours"]["value"] == pytest.approx(1.5)
    assert rows[0]["counters"] == {'cycle_graph_replays{batch="1"}': 5}
    assert "worst over its neighbours 1.5" in capsys.readouterr().out
