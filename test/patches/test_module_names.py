"""pytest imports test modules outside packages by their base name: two of one name and nothing is collected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_module_names_are_unique() -> None:
    modules = [path for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert len(modules) > 50
    twice = [name for name, count in Counter(path.name for path in modules).items() if count > 1]
    assert not twice, f"rename one of each: {twice}"
