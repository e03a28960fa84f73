"""The slice: shapes, expert union, plans and rows, with stand-ins for the engines."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.bench_verify.commands import slice as slice_command
from sglang.bench_verify.rows import Metric, Row
from sglang.bench_verify.slice import plan as plans
from sglang.bench_verify.slice.derived import profile_row, statistics_cost
from sglang.bench_verify.slice.engines import (
    INJECT,
    EngineSpec,
    SliceOptions,
    engine_arguments,
    engine_environment,
)
from sglang.bench_verify.slice.shapes import NAMED, ShapeError, find, rank_slice, target_config, write_models
from sglang.bench_verify.slice.union import correlated_union, expected_union, simulated_union
from sglang.bench_verify.verdict import verdicts


@pytest.mark.parametrize(
    ("experts", "per_token", "tokens", "union"),
    [
        (384, 8, 1, 8.0),
        (384, 8, 3, 23.5),
        (384, 8, 6, 46.0),
        (64, 8, 3, 21.1),
        (256, 8, 3, 23.3),
        (8, 8, 5, 8.0),
    ],
)
def test_expected_expert_union(experts: int, per_token: int, tokens: int, union: float) -> None:
    """G8 (omlx#2077): a verify of three tokens reads the experts of three tokens."""
    assert expected_union(experts, per_token, tokens) == pytest.approx(
        union, abs=0.6 if tokens == 6 else 0.06
    )


@given(st.sampled_from([(8, 2), (64, 8), (384, 8)]), st.integers(1, 6))
def test_expectation_agrees_with_simulation(model: tuple[int, int], tokens: int) -> None:
    experts, per_token = model
    simulated = simulated_union(experts, per_token, tokens, rounds=800)
    assert expected_union(experts, per_token, tokens) == pytest.approx(simulated, rel=0.03)


@given(st.integers(1, 8), st.floats(0, 1))
def test_shared_experts_shrink_the_union(tokens: int, repeat: float) -> None:
    union = correlated_union(384, 8, tokens, repeat)
    assert 8.0 - 1e-9 <= union <= expected_union(384, 8, tokens) + 1e-9


def test_a_rank_of_kimi_is_the_slice_of_the_reference_figures() -> None:
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    config = target_config(shape)
    wanted = {
        "hidden_size": 7168,
        "num_attention_heads": 8,
        "moe_intermediate_size": 256,
        "intermediate_size": 2304,
        "n_routed_experts": 64,
        "vocab_size": 20480,
        "num_hidden_layers": 12,
        "first_k_dense_replace": 1,
    }
    assert {name: config[name] for name in wanted} == wanted


def test_a_written_config_reads_back(tmp_path: Path) -> None:
    shape = rank_slice(NAMED["deepseek-v3"], tp=8, layers=4)
    target, draft = write_models(shape, tmp_path)
    again = find(str(target))
    assert (again.heads, again.experts, again.groups, again.layers) == (16, 256, 8, 4)
    assert json.loads((draft / "config.json").read_text())["num_hidden_layers"] == 1


def test_a_slice_of_two_ranks_holds_twice_the_share() -> None:
    one, two = (rank_slice(NAMED["kimi-k2.5"], experts=64, ranks=ranks) for ranks in (1, 2))
    assert (two.heads, two.expert_width, two.dense_width) == (
        2 * one.heads,
        2 * one.expert_width,
        2 * one.dense_width,
    )
    assert (two.hidden, two.layers, two.experts) == (one.hidden, one.layers, one.experts)
    assert one.name != two.name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rank_slice(NAMED["kimi-k2.5"], tp=7), "64 does not divide by 7"),
        (lambda: rank_slice(NAMED["kimi-k2.5"], experts=4), "4 experts are fewer than the 8"),
        (lambda: find("kimi-k3"), "kimi-k2.5"),
    ],
)
def test_a_slice_that_cannot_be_cut_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        call()


@pytest.mark.parametrize(("steps", "simulated"), [(0, None), (1, "2.0"), (2, "2.0"), (4, "2.0")])
def test_simulated_acceptance_reaches_only_speculating_engines(
    steps: int, simulated: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "9")
    spec = EngineSpec("x", steps, topics_off=("verify-attention",), environment={"NCCL_PROTO": "LL"})
    environment = engine_environment(spec, SliceOptions(), tmp_path / "u")
    assert environment.get("SGLANG_SIMULATE_ACC_LEN") == simulated
    assert environment["SGLANG_FORK_DISABLE"] == "verify-attention" and environment["NCCL_PROTO"] == "LL"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(INJECT)
    pair = SliceOptions(ranks=2, arguments=(("enforce_disable_flashinfer_allreduce_fusion", True),))
    of_two = engine_arguments(spec, pair, "t", "d")
    assert of_two["tp_size"] == 2 and of_two["enforce_disable_flashinfer_allreduce_fusion"] is True
    arguments = engine_arguments(spec, SliceOptions(), "t", "d")
    assert "tp_size" not in arguments
    assert arguments.get("speculative_num_draft_tokens") == (steps + 1 if steps else None)


def test_the_router_injection_loads_at_start_and_only_when_asked() -> None:
    code = "import sys; print([type(f).__name__ for f in sys.meta_path])"
    for value, expected in (("random", True), ("", False)):
        environment = {**os.environ, "PYTHONPATH": str(INJECT), "BENCH_VERIFY_ROUTER": value}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        assert ("_Finder" in done.stdout) is expected


def test_a_site_file_further_down_the_path_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.site_file_ran = True\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{INJECT}{os.pathsep}{tmp_path}",
        "BENCH_VERIFY_ROUTER": "random",
    }
    code = "import sys; print(sys.site_file_ran)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "True"


def test_injected_logits_are_noise_and_the_union_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("BENCH_VERIFY_ROUTER", raising=False)
    monkeypatch.setenv("BENCH_VERIFY_UNION", str(tmp_path / "union.txt"))
    spec = importlib.util.spec_from_file_location("injected", INJECT / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    injected = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(injected)

    class Gate:
        def forward(self, x: Any) -> Any:
            return torch.zeros(x.shape[0], 64)

    class Pick:
        def forward_native(self, logits: Any) -> Any:
            ids = logits.topk(8).indices
            return type("Output", (), {"topk_ids": ids})()

        forward_cuda = forward_cpu = forward_native

    injected.patch_gate(type("M", (), {"MoEGate": Gate}))
    injected.patch_topk(type("M", (), {"TopK": Pick}))
    for _ in range(200):
        gate = Gate()
        first = gate.forward(torch.zeros(3, 4))
        assert torch.equal(first, gate.forward(torch.zeros(3, 4)))
        Pick().forward_native(first)
    counts = [int(line.split()[1]) for line in (tmp_path / "union.txt").read_text().splitlines()]
    assert sum(counts) / len(counts) == pytest.approx(expected_union(64, 8, 3), rel=0.05)


class FakeEngine:
    """An engine whose times follow from its spec."""

    startup_s = 40.0

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def experts_per_layer(self, tokens: int) -> float | None:
        """As counted in passes of this many rows."""
        return {1: 8.0, 3: 21.0, 12: 51.0}.get(tokens)


class FakeFleet:
    """A fleet of fake engines; remembers the order of measurements."""

    def __init__(self, specs: list[EngineSpec]) -> None:
        self.shape = rank_slice(NAMED["kimi-k2.5"], experts=64)
        self.options = SliceOptions()
        self.engines = {spec.name: FakeEngine(spec) for spec in specs}
        self.failures: dict[str, str] = {}

    def in_turn(
        self, context: int, batch: int, tokens: int, rounds: int, deadline: float | None
    ) -> dict[str, Any]:
        """Figures that look like upstream's and the fork's."""
        found: dict[str, Any] = {}
        for name, engine in self.engines.items():
            slow = engine.spec.variant == "upstream"
            cycle = 3.0 + (context / 400.0 if slow else context / 40000.0)
            phases = {
                "draft": 0.4,
                "verify": cycle - 0.9,
                "sample": 0.1,
                "draft_extend": 0.3,
                "host_gap": 0.1,
            }
            figure = {"ms_per_token": 1.9, "ms_per_cycle": cycle, "kept_length": 2.0, "phases": phases}
            found[name] = [figure] * rounds
        return found


def rows_of(steps: tuple[int, ...] = (0, 1, 2, 3)) -> list[Row]:
    """Rows of a fake run."""
    plan = plans.SlicePlan(contexts=(1024, 65536), steps=steps, rounds=2)
    specs = [
        EngineSpec(f"{variant}-{step}", step, variant) for variant in plan.variants for step in plan.steps
    ]
    fleet: Any = FakeFleet(specs)
    return plans.run(fleet, plan, "h200")


def test_rows_hold_phases_that_sum_to_the_wall_and_the_union() -> None:
    rows = rows_of()
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        if row.case["draft_tokens"]:
            assert row.counters["phases_over_wall"] == pytest.approx(1.0, abs=0.05)
        if row.case["draft_tokens"] == 3:
            assert row.metrics["experts_per_layer"].value == 21.0


def test_a_batch_reports_the_experts_of_its_own_passes() -> None:
    """Those of a pass of one request would say that a batch reads no more experts than it; uncounted is left out."""
    plan = plans.SlicePlan(contexts=(1024,), batches=(1, 4, 8), steps=(0, 2), variants=("fork",), rounds=1)
    fleet: Any = FakeFleet([EngineSpec(f"fork-{steps}", steps) for steps in plan.steps])
    counted = {
        (row.case["batch"], row.case["draft_tokens"]): row.metrics["experts_per_layer"].value
        for row in plans.run(fleet, plan, "h200")
        if "experts_per_layer" in row.metrics
    }
    assert counted == {(1, 0): 8.0, (1, 3): 21.0, (4, 3): 51.0}


def test_the_verdict_names_winner_length_and_what_eats_the_rest() -> None:
    by_case = {(item.variant, item.context): item for item in verdicts(rows_of(), rates=(0.7, 0.4, 0.2))}
    assert by_case["upstream", 65536].best == 0 and "loses" in by_case["upstream", 65536].text()
    fork = by_case["fork", 1024]
    assert fork.best == 3 and "wins" in fork.text() and "verify" in fork.text()
    assert max(fork.shares, key=lambda name: fork.shares[name]) == "verify"


def test_a_variant_without_a_decode_is_judged_by_the_other_ones() -> None:
    rows = [row for row in rows_of((0, 2)) if not (row.variant == "fork" and row.case["draft_tokens"] == 0)]
    assert {item.variant for item in verdicts(rows)} == {"fork", "upstream"}


def test_the_pool_holds_the_largest_case() -> None:
    plan = plans.SlicePlan(contexts=(1024, 65536), batches=(1, 4), tokens=128)
    assert plans.pool_tokens(plan) >= 4 * (65536 + 128)


def test_the_cost_of_the_statistics_is_paired_by_repeat() -> None:
    def cycle(off: tuple[str, ...], samples: list[float]) -> Row:
        case = {"context": 1024, "batch": 1, "draft_tokens": 3, "model": "kimi"}
        return Row("slice", "h200", "fork", case, {"cycle_ms": Metric.of(samples, "ms")}, topics_off=off)

    on, off = cycle((), [3.03, 3.13]), cycle(("verify-stats",), [3.0, 3.1])
    (row,) = statistics_cost([on, off, cycle(("verify-attention",), [9.0, 9.0])])
    assert row.bench == "stats_cost" and row.metrics["overhead_percent"].value == pytest.approx(
        0.98, abs=0.02
    )
    assert statistics_cost([on]) == []


def test_a_profile_becomes_a_row() -> None:
    entry = {
        "engine": "fork-eagle3",
        "context": 1024,
        "kernels": 482.0,
        "launches_outside_graphs": 70.0,
        "syncs": 1.0,
    }
    row = profile_row(entry, EngineSpec("fork-eagle3"), rank_slice(NAMED["kimi-k2.5"], experts=64), "h200")
    assert row.case["draft_tokens"] == 3 and row.metrics["launches_outside_graphs"].value == 70


def test_cases_above_the_largest_are_left_out() -> None:
    plan = plans.SlicePlan(contexts=(1024, 16384, 65536), batches=(1, 8), most_tokens=131072)
    assert plan.cases() == [(1024, 1), (16384, 1), (65536, 1), (1024, 8), (16384, 8)]
    assert plans.pool_tokens(plan) == 131072 + 8 * (plan.tokens + 1024)


@pytest.mark.parametrize("text", ["0.5,0.6", "1.2", "-0.1", "x", ""])
def test_accept_rates_are_shares_that_fall(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        slice_command.rates(text)
    assert slice_command.rates("0.7,0.4,0.4") == (0.7, 0.4, 0.4)


def test_the_best_draft_length_follows_the_rates() -> None:
    """G6 (sglang#25696): with a dear verify and few kept drafts the shortest chain wins, and then none."""

    def cycle(steps: int, ms: float) -> Row:
        case = {"context": 1024, "batch": 1, "draft_tokens": steps + 1 if steps else 0}
        name = "cycle_ms" if steps else "decode_ms"
        return Row("slice", "h200", "fork", case, {name: Metric(ms, "ms")})

    rows = [cycle(steps, ms) for steps, ms in ((0, 2.0), (1, 2.5), (2, 2.9), (3, 3.4), (4, 3.8))]
    assert verdicts(rows, (0.9, 0.8, 0.7, 0.6))[0].best == 4
    assert verdicts(rows, (0.5, 0.1, 0.0, 0.0))[0].best == 1
    assert verdicts(rows, (0.1, 0.0, 0.0, 0.0))[0].best == 0
