"""vllm#19105: the user's NCCL variables reach every worker, and that is read back inside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks as processes
from sglang.srt.speculative.stats import ranks
from sglang.srt.verify_settings.native import native_environment


def worker(rank: int, size: int, folder: Path, override: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
    """One rank of a CPU group: what it gathers of all."""
    os.environ.update(override.get(rank, {}))
    import torch.distributed as dist

    return ranks.gather(rank, size, dist.group.WORLD)


def run_ranks(folder: Path, override: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
    """The records that rank 0 of two gathered."""
    outcomes, _ = processes.run(worker, 2, folder, override)
    for outcome in outcomes:
        assert outcome.error == "", outcome.output
    records: list[dict[str, Any]] = outcomes[0].value
    return records


def test_variables_reach_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    records = run_ranks(tmp_path, {})
    assert [record["rank"] for record in records] == [0, 1]
    assert all(record["variables"]["NCCL_P2P_LEVEL"] == "SYS" for record in records)
    assert len({record["pid"] for record in records}) == 2
    assert "differs" not in ranks.text(records)


def test_a_rank_that_sees_something_else_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")
    records = run_ranks(tmp_path, {1: {"NCCL_PROTO": "Simple"}})
    assert "rank 1 differs" in ranks.text(records) and "NCCL_PROTO=Simple" in ranks.text(records)


def test_the_reading_is_the_c_library_and_not_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert native_environment()["NCCL_ALGO"] == "Ring"
    # A library that calls putenv is seen although os.environ is not told.
    os.putenv("NCCL_ALGO", "Tree")
    try:
        assert os.environ["NCCL_ALGO"] == "Ring" and native_environment()["NCCL_ALGO"] == "Tree"
    finally:
        os.putenv("NCCL_ALGO", "Ring")
