"""The made-up checkpoints of test/arguments, and what a hub answers in test/recipes, serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "recipes"), str(TESTS / "arguments")]
