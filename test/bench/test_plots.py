"""Plots are made from rows, and the same rows give the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.bench_verify.plots import draw
from sglang.bench_verify.rows import Metric, Row

pytest.importorskip("matplotlib")


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


def test_three_plots_that_come_out_the_same_again(tmp_path: Path) -> None:
    first = draw(rows(), tmp_path / "a")
    second = draw(rows(), tmp_path / "b")
    assert [path.name for path in first] == ["cycle_by_context.svg", "break_even.svg", "phases.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert "upstream: decode" in first[0].read_text()


def test_rows_without_contexts_give_no_plot(tmp_path: Path) -> None:
    assert draw([Row("demo", "cpu", "fork", {"batch": 1}, {})], tmp_path) == []
