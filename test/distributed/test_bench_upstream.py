"""Upstream's groups in the bench and the start probe: real ranks over gloo, upstream's own code on a made-up NVLink pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks

# Imported before ranks are forked: each of them would pay for it again.
import sglang.srt.distributed.device_communicators.custom_all_reduce_utils
import sglang.srt.distributed.parallel_state  # noqa: F401
import torch
from sglang.bench_all_reduce import upstream


def admitted(rank: int, size: int, folder: Path, prepared: bool) -> Any:
    """What upstream's check of a custom all-reduce says where NVML names two GPUs joined by NVLink."""
    from sglang.srt.distributed.device_communicators import custom_all_reduce_utils as utils

    utils.is_full_nvlink = lambda *_: True  # type: ignore[assignment]
    torch.cuda.device_count = lambda: size
    group = torch.distributed.group.WORLD
    if prepared:
        world = upstream.as_a_server(rank, size, rank, "", "gloo")
        assert (world.world_size, world.rank_in_group) == (size, rank)
        group = world.cpu_group
    return utils.can_use_custom_all_reduce_with_nvlink(
        group=group, device=torch.device("cuda", rank), supported_world_size=[2], cls_name="Custom"
    )


def test_upstreams_check_asks_for_the_group_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it every machine is refused, as two H200 over NVLink were in the first run of this bench."""
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    found, _ = ranks.run(admitted, 2, tmp_path, True)
    assert [(each.value, each.error) for each in found] == [(True, ""), (True, "")], found[0].output
    found, _ = ranks.run(admitted, 2, tmp_path, False)
    assert all("world group is not initialized" in each.output for each in found)


def refused(rank: int, size: int, folder: Path) -> list[Any]:
    world = upstream.as_a_server(rank, size, rank, "", "gloo")
    plain, silent = upstream.coordinator(size, rank, "gloo", custom=False)
    made, words = upstream.coordinator(size, rank, "gloo", custom=True)
    x = torch.full((3, 8), float(rank + 1))
    return [world.world_size, silent, words, made.ca_comm is None, plain.all_reduce(x).sum().item()]


def test_a_refusal_is_in_upstreams_words(tmp_path: Path) -> None:
    found, _ = ranks.run(refused, 2, tmp_path)
    for each in found:
        assert each.error == "", each.output
        size, silent, words, off, total = each.value
        assert (size, silent, off, total) == (2, "", True, 72.0)
        # There is no GPU here, so upstream has no class for it.
        assert words.startswith("upstream's custom all-reduce is off: Setup Custom allreduce failed")


def test_words_are_one_line_and_not_repeated() -> None:
    assert upstream.refusal(["a\n  b", "a b", "c"]).endswith("is off: a b; c")
    assert "without a word" in upstream.refusal([])
    assert len(upstream.refusal(["x" * 1000])) < 400
