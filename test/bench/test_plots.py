"""Plots are made from rows, and the same rows give the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.bench_verify.plots import draw
from sglang.bench_verify.rows import Metric, Results, Row

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[Row]:
    """Upstream and fork at three contexts."""
    found = []
    for variant, slope in (("upstream", 2.3), ("fork", 0.02)):
        for context in (1024, 16384, 65536):
            cycle = 3.0 + slope * context / 1000
            case = {"context": context, "batch": 1, "model": "kimi"}
            parts = {"draft": 0.4, "verify": cycle - 0.8, "sample": 0.1, "draft_extend": 0.2, "host_gap": 0.1}
            found.append(
                Row("slice", "h200", variant, {**case, "draft_tokens": 0}, {"decode_ms": Metric(1.9, "ms")})
            )
            found.append(
                Row(
                    "slice",
                    "h200",
                    variant,
                    {**case, "draft_tokens": 3},
                    {"cycle_ms": Metric(cycle, "ms")},
                    parts,
                )
            )
    return found


def test_four_plots_that_come_out_the_same_again(tmp_path: Path) -> None:
    first = draw(rows(), tmp_path / "a")
    second = draw(rows(), tmp_path / "b")
    names = ["cycle_by_context.svg", "verify_by_context.svg", "break_even.svg", "phases.svg"]
    assert [path.name for path in first] == names
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert "upstream: decode" in first[0].read_text()
    assert "fork: verify of 3 tokens" in first[1].read_text()


def test_the_committed_plots_are_those_of_the_committed_rows(tmp_path: Path) -> None:
    results = ROOT / "benchmark/results"
    made = draw(Results.load(results / "h200_slice_one_graph.json").rows, tmp_path, "h200_slice_")
    assert len(made) == 4
    for path in made:
        assert path.read_bytes() == (results / "plots" / path.name).read_bytes(), path.name


def test_rows_without_contexts_give_no_plot(tmp_path: Path) -> None:
    assert draw([Row("demo", "cpu", "fork", {"batch": 1}, {})], tmp_path) == []
