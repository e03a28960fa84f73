"""vllm#19105: the user's NCCL variables reach every worker, and that is read back inside it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.speculative.stats import ranks
from sglang.srt.verify_settings.native import native_environment

DEADLINE_S = 120.0


def worker(rank: int, size: int, rendezvous: str, override: dict[str, str], out: Any) -> None:
    """One rank: joins a CPU group, gathers the records and reports what rank 0 got."""
    os.environ.update(override)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        records = ranks.gather(rank, size, dist.group.WORLD)
        if rank == 0:
            out.put(records)
    finally:
        dist.destroy_process_group()


def run_ranks(tmp_path: Path, override: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
    """Start two spawned ranks and return the gathered records, within a deadline."""
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, 2, str(tmp_path / "meet"), override.get(rank, {}), out))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        records: list[dict[str, Any]] = out.get(timeout=DEADLINE_S)
        return records
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


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
