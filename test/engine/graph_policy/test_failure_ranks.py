"""A plain step that fails with two ranks: both go on with cycles, or neither does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from sglang.srt.speculative.auto import failure, hooks, plain
from sglang.srt.speculative.auto.runtime import OWED
from sglang.srt.speculative.auto.runtime import Runtime as RealRuntime


def group_of(rank: int, size: int) -> Any:
    """As much of upstream's coordinator as is read."""
    return SimpleNamespace(world_size=size, rank_in_group=rank, unique_name="tp:0", ranks=list(range(size)))


def rank_main(rank: int, size: int, folder: Path, failing: dict[int, str], limit_s: float) -> str:
    """A rank that runs one plain step: what comes of it."""
    import sglang.srt.distributed.one_shot.exchange as module

    module.GRACE_S, failure.LIMIT_S = 1.0, limit_s

    class Runtime:
        gave_up, plain_begun = None, 0
        worker = SimpleNamespace(
            target_worker=SimpleNamespace(model_runner=SimpleNamespace(tp_group=group_of(rank, size)))
        )
        exchange, give_up = RealRuntime.exchange, RealRuntime.give_up

        def choose(self, batch: Any) -> str:
            return "plain"

        def before_plain(self, batch: Any, on_publish: Any) -> None:
            self.plain_begun += 1
            for request in batch.reqs:
                setattr(request, OWED, getattr(request, OWED, 0) + 1)

        def before_cycle(self, batch: Any, on_publish: Any) -> None:
            """Nothing is owed."""

    def step(worker: Any, runtime: Any, batch: Any, on_publish: Any) -> str:
        way = failing.get(rank)
        if way == "early":
            raise AttributeError("no such thing")
        if way == "late" or (way == "second" and runtime.plain_begun == 2):
            raise AttributeError(f"no such thing on rank {rank}")
        return "plain"

    hooks.timed_plain = step
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    fields = {**dict.fromkeys(plain.CHANGED, 1), "forward_mode": mode}
    batch = SimpleNamespace(**fields, is_extend_in_batch=False, reqs=[SimpleNamespace()])
    worker = SimpleNamespace(fork_auto=Runtime())
    try:
        if failing.get(rank) == "second":
            assert hooks.step(lambda *args, **kw: "cycle", worker, batch) == "plain"
        return str(hooks.step(lambda *args, **kw: "cycle", worker, batch))
    except failure.RanksParted as error:
        assert isinstance(error.__cause__, AttributeError) and worker.fork_auto.gave_up is None
        return str(error)


def outcomes(folder: Path, failing: dict[int, str], limit_s: float) -> list[str]:
    found, _ = ranks.run(rank_main, 2, folder, failing, limit_s)
    assert all(outcome.error == "" and outcome.value is not None for outcome in found), found
    return [outcome.value for outcome in found]


def test_all_ranks_that_failed_at_one_place_go_on_with_cycles(tmp_path: Path) -> None:
    assert outcomes(tmp_path, {0: "late", 1: "late"}, 60.0) == ["cycle", "cycle"]


def test_no_rank_failed(tmp_path: Path) -> None:
    assert outcomes(tmp_path, {}, 60.0) == ["plain", "plain"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_failed_alone_ends(rank: int, tmp_path: Path) -> None:
    """It does not run a cycle beside the other's plain decode."""
    found = outcomes(tmp_path, {rank: "early"}, 0.5)
    assert found[1 - rank] == "plain"
    for words in (f"failed on rank {rank} (AttributeError at", f"not on rank {1 - rank}", failure.CURE):
        assert words in found[rank]


def test_ranks_that_failed_at_different_places_end(tmp_path: Path) -> None:
    """Between the places one of them may have sent what the other has not."""
    found = outcomes(tmp_path, {0: "early", 1: "late"}, 60.0)
    assert all("different places" in text and "rank 1: AttributeError at" in text for text in found)


def test_ranks_that_failed_in_different_steps_end(tmp_path: Path) -> None:
    """At the same place, but one of them had launched the step before."""
    found = outcomes(tmp_path, {0: "late", 1: "second"}, 60.0)
    assert all("plain step 1, rank 1" in text and "plain step 2)" in text for text in found)


def test_one_rank_asks_nobody() -> None:
    assert failure.exchange_of(SimpleNamespace()) is None
    failure.agree(ValueError("x"), None, 1)
