"""Runs the interpreted checks in processes where Triton interprets, and reports their failures as these tests'."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter_run import assert_passes_interpreted

pytestmark = pytest.mark.long


@pytest.mark.parametrize("folder", ("interpreted", "interpreted_draw"))
def test_kernels_under_the_interpreter(folder: str) -> None:
    assert_passes_interpreted(Path(__file__).parent / folder, limit_s=900)
