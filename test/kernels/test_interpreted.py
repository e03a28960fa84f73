"""Runs ``interpreted/`` in a process where Triton interprets, and reports its failures as this test's."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter_run import assert_passes_interpreted

pytestmark = pytest.mark.long


def test_kernels_under_the_interpreter() -> None:
    assert_passes_interpreted(Path(__file__).parent / "interpreted", limit_s=1200)
