"""Phases sum to the wall time within 5%: over every committed row, and what does not is marked wherever it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.bench_verify.headline import collect
from sglang.bench_verify.rows import Metric, Row
from sglang.bench_verify.show import slice_rows
from sglang.bench_verify.soundness import LIMIT, doubts, measured_from_outside, phases_over_cycle
from sglang.bench_verify.verdict import verdicts

RESULTS = Path(__file__).resolve().parents[2] / "benchmark/results"
# Measured once, or beside other work on the GPU (docs/bench.md): their phases are not used.
ROUGH = {
    ("slice", 16384, 8, 4),
    ("cycle_graph", 16384, 1, 3),
    ("cycle_graph", 4096, 2, 3),
    # Two samples 15% apart, the shorter one below its own phases: a difference of two answers, one of them disturbed.
    ("cycle_batches", 4096, 2, 3),
}


def committed() -> list[Row]:
    rows = [source.row for source in collect(RESULTS)]
    return [row for row in rows if phases_over_cycle(row) is not None and measured_from_outside(row)]


def test_phases_of_committed_rows_sum_to_their_cycles() -> None:
    rows = committed()
    assert len(rows) > 45
    off = [row for row in rows if abs((phases_over_cycle(row) or 0.0) - 1.0) > LIMIT]
    case = {(row.bench, row.case["context"], row.case["batch"], row.case["draft_tokens"]) for row in off}
    assert case == ROUGH
    assert all(doubts(row) for row in off) and not any(doubts(row) for row in rows if row not in off)


def row(cycles: tuple[float, ...], verify: float, **case: Any) -> Row:
    return Row(
        "slice",
        "h200",
        "fork",
        {"context": 1024, "batch": 1, "draft_tokens": 3, **case},
        {"cycle_ms": Metric.of(cycles, "ms")},
        {"draft": 0.5, "verify": verify},
    )


BASE = Row(
    "slice",
    "h200",
    "fork",
    {"context": 1024, "batch": 1, "draft_tokens": 0},
    {"decode_ms": Metric(1.5, "ms")},
)


@pytest.mark.parametrize(
    ("cycles", "verify", "words"),
    [
        ((2.0, 2.0), 1.55, ()),
        ((2.0,), 1.45, ()),
        ((2.0, 2.02), 1.7, ("phases sum to 109%",)),
        ((2.0,), 1.7, ("phases sum to 110%", "measured once: raise --rounds")),
        ((2.0,), 1.3, ("phases sum to 90%", "measured once")),
    ],
)
def test_a_case_whose_phases_do_not_stand_is_marked(
    cycles: tuple[float, ...], verify: float, words: tuple[str, ...]
) -> None:
    found = row(cycles, verify)
    said = doubts(found)
    assert len(said) == len(words) and all(word in text for word, text in zip(words, said, strict=True))
    (verdict,) = verdicts([BASE, found])
    assert ("rough" in verdict.text()) is bool(words)
    head, lines = slice_rows([found])
    assert lines[0][head.index("sum/cycle")].endswith("!") is bool(words)


def test_a_cycle_made_of_its_phases_is_no_evidence() -> None:
    made = Row("launch", "cpu", "fork", {"draft_tokens": 3}, {"cycle_ms": Metric(2.0, "ms")}, {"verify": 2.0})
    assert phases_over_cycle(made) == 1.0 and not measured_from_outside(made) and not doubts(made)


def test_a_verdict_of_a_restless_machine_says_so() -> None:
    (verdict,) = verdicts([BASE, row((1.0, 6.0), 3.0)])
    assert "rough: repeats of the cycle differ by x6.0" in verdict.text()
    (verdict,) = verdicts([BASE, row((3.4, 3.6), 3.0)])
    assert "rough" not in verdict.text()
