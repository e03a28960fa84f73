"""docs/settings.md holds what is declared, neither less nor something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sglang.srt.verify_settings import profiles
from sglang.srt.verify_settings.catalogue import OWN_PREFIXES, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
TABLES = {
    "fork": OWN_PREFIXES,
    "nccl": ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "SGLANG_NCCL_"),
}


def between(first: str, last: str) -> str:
    """The part of the page between two marks."""
    found = re.search(
        rf"<!-- {first} -->\n(.*?)<!-- /{last} -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None, first
    return found[1]


@pytest.mark.parametrize("name", TABLES)
def test_table(name: str) -> None:
    assert between(f"settings: {name}", "settings") == markdown(TABLES[name])


def test_profiles() -> None:
    assert between("profiles", "profiles") == profiles.markdown()
