"""The bench of the switch without a GPU: its whole run over engines that answer from a table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.bench_verify.slice.engines import EngineError

FILE = Path(__file__).resolve().parents[2] / "benchmark" / "speculative_auto.py"
TOKEN_MS = {"decode": 2.0, "auto-1.0": 2.06, "auto-2.5": 1.2}
COUNTERS = {'spec_auto_steps{mode="plain"}': 7, 'verify_graph_steps{kind="verify",reason="x"}': 3, "other": 1}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speculative_auto_bench", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeEngine:
    def __init__(self, spec: Any) -> None:
        self.spec, self.startup_s, self.batches = spec, 40.0, list[int]()

    def measure(self, context: int, batch: int, tokens: int) -> dict[str, Any]:
        self.batches.append(batch)
        return {"ms_per_token": TOKEN_MS[self.spec.name]}

    def state(self) -> dict[str, Any]:
        return {"counters": COUNTERS}


class FakeFleet:
    broken = ""

    def __init__(self, shape: Any, specs: list[Any], folder: str, options: Any) -> None:
        self.shape = shape
        self.engines = {spec.name: FakeEngine(spec) for spec in specs if spec.name != self.broken}
        self.failures = {self.broken: "did not start"} if self.broken else {}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *unused: Any) -> None: ...

    def measure(self, name: str, context: int, batch: int, tokens: int) -> dict[str, Any]:
        if context == 16384 and name == "auto-1.0":
            raise EngineError("out of memory")
        return self.engines[name].measure(context, batch, tokens)

    def in_turn(
        self, context: int, batch: int, tokens: int, rounds: int, deadline: float
    ) -> dict[str, list[Any]]:
        return {
            name: [engine.measure(context, batch, tokens)] * rounds for name, engine in self.engines.items()
        }


@pytest.mark.parametrize("broken", ("", "decode", "auto-2.5"))
def test_the_whole_run(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    fleet = type("Fleet", (FakeFleet,), {"broken": broken})
    monkeypatch.setattr(module, "Fleet", fleet)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["speculative_auto.py", "--out", str(out), "--crossings", "10"])
    module.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    crossings = [row for row in rows if "what" in row["case"]]
    cases = [row for row in rows if "engine" in row["case"]]
    assert len(crossings) == (broken != "auto-2.5")
    assert len(cases) == len(module.CASES) * (3 - bool(broken))
    for row in cases:
        ratio = row["metrics"].get("over_plain_decode")
        if row["case"]["engine"] == "decode" or broken == "decode":
            assert ratio is None
        else:
            assert ratio["value"] == pytest.approx(TOKEN_MS[row["case"]["engine"]] / 2.0)
        assert "other" not in row["counters"] and len(row["counters"]) == 2


def test_crossings_pass_the_captured_ceiling_both_ways() -> None:
    module = load()
    (spec,) = [spec for spec in module.specs() if spec.name == "auto-2.5"]
    engine = FakeEngine(spec)
    row = module.cross(SimpleNamespace(engines={"auto-2.5": engine}), 100, "h200", None)
    assert row.metrics["crossings"].value == 100
    above = [batch > max(module.CAPTURED) for batch in engine.batches]
    assert above == [True, False] * 50
