"""Device tests use the cases and checks of ``test/kernels``, and may be run a part at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part 2/3``: every third test from the second on, for a machine that is there for minutes only."""
    parser.addoption("--part", default="1/1", help="run part I of N of the tests, as I/N")


def part_of(items: list[pytest.Item], part: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(in the part, not in it); every item is in exactly one part."""
    number, parts = (int(x) for x in part.split("/"))
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--part {part}: there is no such part")
    chosen = items[number - 1 :: parts]
    return chosen, [item for item in items if item not in chosen]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the part."""
    items[:], left = part_of(items, config.getoption("part", default="1/1"))
    if left:
        config.hook.pytest_deselected(items=left)
