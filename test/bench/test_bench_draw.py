"""Runs the interpreted check of the draw's bench in a process where Triton interprets."""

from __future__ import annotations

from pathlib import Path

from interpreter_run import assert_passes_interpreted


def test_the_bench_under_the_interpreter() -> None:
    assert_passes_interpreted(Path(__file__).parent / "interpreted_draw_bench", limit_s=300)
