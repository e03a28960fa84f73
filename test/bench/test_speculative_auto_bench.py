"""The bench of the switch without a GPU: its whole run over engines that answer from a table."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.bench_verify.slice import host
from sglang.bench_verify.slice.engines import Engine, EngineError, Fleet

FILE = Path(__file__).resolve().parents[2] / "benchmark" / "speculative_auto.py"
TOKEN_MS = {"decode": 2.0, "auto-1.0": 2.06, "auto-2.5": 1.2}
ADDED = {'spec_auto_steps{mode="plain"}': 7, 'verify_graph_steps{kind="verify",reason="x"}': 3}
RECENT = [
    {"mode": "plain", "kind": "steady", "steps": 90, "median_ms": 2.02, "mean_ms": 2.03, "worst_ms": 2.5},
    {"mode": "plain", "kind": "caught up", "steps": 10, "median_ms": 3.0, "mean_ms": 3.03, "worst_ms": 3.5},
    {"mode": "plain", "kind": "changed", "steps": 2, "median_ms": 9.0, "mean_ms": 9.0, "worst_ms": 9.5},
    {"mode": "speculate", "kind": "steady", "steps": 6, "median_ms": 2.4, "mean_ms": 2.4, "worst_ms": 2.4},
]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speculative_auto_bench", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeEngine:
    """Adds the same to its counters whenever it is asked for its state."""

    def __init__(self, spec: Any) -> None:
        self.spec, self.startup_s, self.batches = spec, 40.0, list[int]()
        self.asked = 0

    def measure(self, context: int, batch: int, tokens: int, watch: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {"ms_per_token": TOKEN_MS[self.spec.name], "lead_s": 0.05}
        return {**found, "states": [self.state(), self.state()]} if watch else found

    def generate(self, context: int, batch: int, tokens: int) -> list[int]:
        self.batches.append(batch)
        return [tokens] * batch

    def state(self) -> dict[str, Any]:
        self.asked += 1
        n = self.asked
        counters = {name: count * n for name, count in ADDED.items()}
        return {
            "counters": {
                **counters,
                "spec_auto_switches": 5,
                'graph_capture_sizes{kind="x"}': 2,
                "other": n,
            },
            "decode_totals": {"decode": [1.5 * 10 * n, 10 * n], "host_gap": [0.1 * 10 * n, 10 * n]},
            **({"speculative_auto": {"recent": RECENT}} if self.spec.steps else {}),
        }


class FakeFleet:
    broken = ""

    def __init__(self, shape: Any, specs: list[Any], folder: str, options: Any) -> None:
        self.shape = shape
        self.engines = {spec.name: FakeEngine(spec) for spec in specs if spec.name != self.broken}
        self.failures = {self.broken: "did not start"} if self.broken else {}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *unused: Any) -> None: ...

    in_turn = Fleet.in_turn

    def measure(
        self, name: str, context: int, batch: int, tokens: int, watch: bool = False
    ) -> dict[str, Any]:
        if context == 16384 and name == "auto-1.0" and not watch:  # the warm-up
            raise EngineError("out of memory")
        return self.engines[name].measure(context, batch, tokens, watch)


@pytest.mark.parametrize("broken", ("", "decode", "auto-2.5"))
def test_the_whole_run(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    monkeypatch.setattr(module, "Fleet", type("Fleet", (FakeFleet,), {"broken": broken}))
    asked: list[Any] = []

    def profiles(fleet: Any, names: list[str], context: int, tokens: int, folder: Path) -> list[Any]:
        asked.append((names, context))
        return [{"engine": name, "context": context, "wall_us": 1.0, "copies": 3.0} for name in names]

    monkeypatch.setattr(module, "profiles", profiles)
    out, traced = tmp_path / "rows.json", tmp_path / "new" / "profiles.json"
    command = ["speculative_auto.py", "--out", str(out), "--crossings", "10", "--profile-out", str(traced)]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    crossings = [row for row in rows if "what" in row["case"]]
    cases = [row for row in rows if "tokens" in row["case"]]
    profiled = [row for row in rows if row["bench"] == "profile"]
    assert len(crossings) == (broken != "auto-2.5")
    assert len(cases) == len(module.CASES) * (3 - bool(broken))
    expected = [name for name in ("decode", "auto-1.0") if name != broken]
    assert asked == [(expected, 16384)] and [row["case"]["engine"] for row in profiled] == expected
    assert [entry["engine"] for entry in json.loads(traced.read_text(encoding="utf-8"))] == expected
    for row in cases:
        metrics, engine = row["metrics"], row["case"]["engine"]
        ratio = metrics.get("over_plain_decode")
        if engine == "decode" or broken == "decode":
            assert ratio is None
        else:
            assert ratio["value"] == pytest.approx(TOKEN_MS[engine] / 2.0)
            assert metrics["plain_step_over_plain_decode"]["value"] == pytest.approx(2.02 / 2.0)
        # Four rounds, and only what was added while the timed tokens ran.
        assert row["counters"] == {
            **{name: 4 * count for name, count in ADDED.items()},
            'graph_capture_sizes{kind="x"}': 2,
        }
        assert metrics["plain_device_ms"]["value"] == pytest.approx(1.5)
        assert metrics["plain_gap_ms"]["value"] == pytest.approx(0.1)
        assert ("plain_step_ms" in metrics) == (engine != "decode")
        if engine != "decode":
            assert metrics["plain_steps_mean_ms"]["value"] == pytest.approx(0.9 * 2.03 + 0.1 * 3.03)
            assert metrics["cycle_step_ms"]["value"] == pytest.approx(2.4)
            assert metrics["plain_steps_worst_ms"]["value"] == pytest.approx(3.5)


def fleet_of(module: ModuleType, engine: Any) -> Any:
    return SimpleNamespace(engines={"auto-2.5": engine})


def spec_of(module: ModuleType) -> Any:
    (spec,) = [spec for spec in module.specs() if spec.name == "auto-2.5"]
    return spec


def test_crossings_pass_the_captured_ceiling_both_ways() -> None:
    module = load()
    engine = FakeEngine(spec_of(module))
    row = module.cross(fleet_of(module, engine), 100, "h200", None)
    assert row.metrics["up_and_down"].value == 100
    above = [batch > max(module.CAPTURED) for batch in engine.batches]
    assert above == [False] + [True, False] * 100
    assert sum(a != b for a, b in itertools.pairwise(above)) == 200
    assert row.counters == ADDED


def test_a_crossing_that_got_no_tokens_is_none() -> None:
    module = load()
    engine = FakeEngine(spec_of(module))
    engine.generate = lambda context, batch, tokens: [tokens] * (batch - 1)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="a batch of 4 got"):
        module.cross(fleet_of(module, engine), 100, "h200", None)


class InOneProcess(Engine):
    """An engine whose requests reach the real host's functions, over a made-up ``sglang.Engine``."""

    def __init__(self, spec: Any, model: Any) -> None:
        self.spec, self.model, self.sent = spec, model, list[dict[str, Any]]()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(dict(request))
        operation = request.pop("op")
        if operation == "state":
            return host.state(self.model)
        run = {"measure": host.measure, "generate": host.generate}[operation]
        try:
            return run(self.model, vocabulary=100, **request)
        except RuntimeError as error:
            raise EngineError(str(error)) from error


class Model:
    """Answers at once; by the clock of the host a longer answer takes no longer."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        count = sampling_params["max_new_tokens"]
        self.calls.append((len(input_ids), count))
        return [{"meta_info": {"completion_tokens": count}} for _ in input_ids]

    def get_server_info(self) -> dict[str, Any]:
        done = len(self.calls)
        return {
            "internal_states": [
                {"spec_stats": {"counters": {"spec_auto_x": done}}, "speculative_auto": {"mode": "plain"}}
            ]
        }


def test_crossings_depend_on_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a longer answer was the faster one, a measurement says so, and a crossing does not care."""
    module = load()
    ticks = itertools.count()
    monkeypatch.setattr(host.time, "perf_counter", lambda: (lambda i: 9e3 * i - i * i)(next(ticks)))
    model = Model()
    engine = InOneProcess(spec_of(module), model)
    with pytest.raises(EngineError, match="disturbed"):
        engine.measure(32, 4, 4)
    model.calls.clear()
    engine.sent.clear()
    row = module.cross(fleet_of(module, engine), 100, "h200", None)
    assert model.calls == [(1, 4)] + [(4, 4), (1, 4)] * 100
    assert {request["op"] for request in engine.sent} == {"generate", "state"}
    assert row.counters == {"spec_auto_x": 201}


def test_a_watched_measurement_tells_the_states_around_its_timed_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(host.time, "perf_counter", lambda: float(next(ticks)) ** 2)
    engine = InOneProcess(spec_of(load()), Model())
    plain = engine.measure(16, 2, 50)
    assert "states" not in plain and "watch" not in engine.sent[-1]
    before, after = engine.measure(16, 2, 50, watch=True)["states"]
    calls = 2 + host.LEADS + 1  # of one measurement
    assert before["counters"] == {"spec_auto_x": 2 * calls - 1} and after["counters"] == {
        "spec_auto_x": 2 * calls
    }
    assert after["speculative_auto"] == {"mode": "plain"}


def test_a_disturbed_lead_does_not_shorten_the_measured_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead that counts is the median: one that took five seconds more would make 50 tokens take a tenth less."""
    clock = [0.0]
    durations = iter([1.0, 1.0, 1.0, 6.0, 1.0, 51.0])

    class Slow(Model):
        def generate(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            clock[0] += next(durations)
            return super().generate(*args, **kwargs)

    monkeypatch.setattr(host.time, "perf_counter", lambda: clock[0])
    found = InOneProcess(spec_of(load()), Slow()).measure(16, 1, 50)
    assert found["ms_per_token"] == pytest.approx(1000.0) and found["lead_s"] == 1.0
