"""What ranks agree on: sizes over gloo, and logits that are equal by construction."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.cycle_graph.graphs import CycleGraphs, Entry
from sglang.srt.speculative.cycle_graph.ranks import Size, agreed, same_logits
from torch import nn

SETS: tuple[set[Size], ...] = (
    {(False, 1), (False, 2), (True, 1), (True, 2)},
    {(False, 1), (False, 2), (True, 1)},
    {(False, 1), (True, 1), (True, 2), (False, 7)},
)


def rank(number: int, store: str, out: str) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=number,
        world_size=len(SETS),
        timeout=timedelta(seconds=300),
    )
    group = SimpleNamespace(world_size=len(SETS), cpu_group=None)
    found = agreed(SETS[number], group)
    Path(out, str(number)).write_text(repr(sorted(found)), encoding="utf-8")
    torch.distributed.destroy_process_group()


def test_only_sizes_that_every_rank_has_are_kept(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank, args=(n, str(tmp_path / "store"), str(tmp_path)))
        for n in range(len(SETS))
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
        assert process.exitcode == 0
    told = {(tmp_path / str(n)).read_text(encoding="utf-8") for n in range(len(SETS))}
    assert told == {"[(False, 1), (True, 1)]"}


def test_one_rank_keeps_what_it_has() -> None:
    assert agreed(SETS[1], SimpleNamespace(world_size=1)) == SETS[1]


def test_sizes_that_are_not_kept_are_not_found() -> None:
    graphs = CycleGraphs(3, False)
    for drawn, batch in sorted(SETS[0]):
        buffers: Any = SimpleNamespace(sampling=object() if drawn else None, batch=batch)
        graphs.add(Entry(buffers, object()))  # type: ignore[arg-type]
    graphs.keep({(False, 1), (True, 2)})
    assert graphs.sizes() == [1] and graphs.sizes(drawn=True) == [2]
    assert graphs.size_for(2) == 0 and graphs.size_for(1, drawn=True) == 2
    assert set(graphs.entries) == {(False, 1), (True, 2)}


def target(**head: Any) -> nn.Module:
    model = nn.Module()
    if head:
        processor = nn.Module()
        for name, value in head.items():
            setattr(processor, name, value)
        model.logits_processor = processor
    return model


@pytest.mark.parametrize(
    ("head", "ranks", "same"),
    [
        ({}, 1, True),
        ({"do_tensor_parallel_all_gather": False}, 1, True),
        ({"do_tensor_parallel_all_gather": True}, 2, True),
        ({"do_tensor_parallel_all_gather": False}, 2, False),
        ({"do_tensor_parallel_all_gather": True, "use_attn_tp_group": True}, 2, False),
        ({}, 2, False),
    ],
)
def test_ranks_with_gathered_logits_may_draw(head: dict[str, Any], ranks: int, same: bool) -> None:
    assert same_logits(target(**head), ranks) is same
