"""Before the switch captures plain decode: room for a prefill stays, and every rank decides as the poorest one does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from sglang.srt.speculative.auto import graphs
from sglang.srt.speculative.auto.rows import RowRing, ring_bytes
from sglang.srt.speculative.graph_policy import capture
from sglang.srt.speculative.graph_policy.room import MIB, ModelFacts, estimate
from sglang.srt.speculative.graph_policy.sizes import KindPlan

LIMIT_S = 600
FACTS = ModelFacts(hidden=7168, vocabulary=163840, layers=61, kept_hidden=3)


def arguments(**changes: int) -> Any:
    return SimpleNamespace(**{"chunked_prefill_size": 8192, "max_prefill_tokens": 16384} | changes)


def test_a_prefill_is_the_largest_chunk_or_without_chunks_the_largest_batch() -> None:
    chunk = graphs.prefill_bytes(arguments(), FACTS)
    assert chunk > 8192 * FACTS.hidden * FACTS.dtype_bytes
    assert graphs.prefill_bytes(arguments(chunked_prefill_size=-1), FACTS) == 2 * chunk


def test_the_ring_is_counted_whole() -> None:
    import torch

    assert RowRing(5, 4, 12, torch.bfloat16, "cpu").bytes == ring_bytes(5, 4, 12, 2)


class Captures:
    """In the place of upstream's capture: counts, and runs out of memory if asked to."""

    def __init__(self, fails: bool) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, plan: KindPlan, facts: ModelFacts, free: Any, work: Any, *, speak: bool) -> str:
        self.calls += 1
        if self.fails:
            raise capture.CaptureOutOfMemory(plan, None, 0)
        return "graphs"


def built(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, fails: bool = False
) -> tuple[Any, Captures]:
    """What ``build`` answers on a device with so many free bytes, and the captures that it made."""
    from sglang.srt import utils
    from sglang.srt.model_executor import runner as runners
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    captures = Captures(fails)
    monkeypatch.setattr(utils, "get_available_gpu_memory", lambda *device: free / (1 << 30))
    monkeypatch.setattr(runners, "get_batch_sizes_to_capture", lambda *asked: ([1, 2, 4], []))
    monkeypatch.setattr(capture, "model_facts", lambda *asked: FACTS)
    monkeypatch.setattr(capture, "watched", captures)
    runner = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        tp_group=SimpleNamespace(world_size=1),
        ps=SimpleNamespace(tp_rank=0),
        server_args=arguments(),
        attn_backend=SimpleNamespace(),
        spec_algorithm=SpeculativeAlgorithm.EAGLE3,
    )
    return graphs.build(runner, reserved), captures


def test_graphs_are_captured_only_beside_ring_and_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = 256 * MIB
    need = estimate(KindPlan("decode", 1, (1, 2, 4)), FACTS).total
    enough = need + ring + graphs.prefill_bytes(arguments(), FACTS)
    (found, reason), captures = built(monkeypatch, enough + MIB, ring)
    assert (found, reason, captures.calls) == ("graphs", None, 1)
    (found, reason), captures = built(monkeypatch, enough - MIB, ring)
    assert found is None and captures.calls == 0
    assert reason is not None and "for other parts" in reason


def test_running_out_of_memory_names_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(capture.CaptureOutOfMemory, match="--speculative-auto off"):
        built(monkeypatch, 1 << 40, 0, fails=True)


def rank_main(rank: int, size: int, folder: Path) -> list[str | None]:
    """Three questions: no rank lacks memory, one does, both do."""
    import torch.distributed as dist
    from sglang.srt.speculative.auto.graphs import on_any_rank

    group = SimpleNamespace(world_size=size, cpu_group=dist.group.WORLD)
    mine = (None, "too little" if rank == 1 else None, f"{rank} GB")
    return [on_any_rank(reason, group) for reason in mine]


def test_one_rank_without_room_keeps_all_from_capturing(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(rank_main, 2, tmp_path, deadline_s=LIMIT_S)
    for outcome in outcomes:
        assert outcome.error == "" and outcome.value is not None, outcome.output[-2000:]
        assert outcome.value == [None, "rank 1: too little", "rank 0: 0 GB"]
