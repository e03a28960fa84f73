"""The preflight over simulated peers in real processes: good, lost, mirrored, late and dead ones, all bounded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sglang.srt.distributed.one_shot import cures, preflight
from sglang.srt.distributed.one_shot.cuda import CudaKernels
from sglang.srt.distributed.one_shot.exchange import Exchange, Silent
from sglang.srt.distributed.one_shot.kernels import WorkspaceSpec
from sglang.srt.distributed.one_shot.patterns import HIGH, expected_sum, part
from sglang.srt.distributed.one_shot.preflight import Fault, judge, tournament
from sglang.srt.distributed.one_shot.protocol import Kind, Step
from sglang.srt.distributed.one_shot.simulated import Fabric, SimulatedKernels

CPU = torch.device("cpu")
ROOM = {
    "eager": WorkspaceSpec(max_rows=8, max_hidden=256),
    "target": WorkspaceSpec(max_rows=8, max_hidden=256),
    "draft": WorkspaceSpec(max_rows=8, max_hidden=256),
    "preflight": WorkspaceSpec(max_rows=4, max_hidden=256),
}


def exchange(rank: int, size: int) -> Exchange:
    from torch.distributed import distributed_c10d

    return Exchange(distributed_c10d._get_default_store(), rank, size, "test")


#: Factors on the preflight's waits. Where every flag comes nothing waits for long, so that a rank may stand still on
#: a busy machine; where one never comes its wait is sat out, four times a GPU's second.
PATIENT, BRISK = 60.0, 4.0


def try_it(
    rank: int,
    size: int,
    folder: Path,
    intercept: Any = None,
    patience: float = PATIENT,
    limit_s: float = preflight.LIMIT_S,
) -> dict[str, Any]:
    meeting = exchange(rank, size)
    kernels = SimulatedKernels(
        Fabric(size, ROOM, folder / "fabric"),
        rank,
        intercept=intercept and intercept(rank, meeting),
        patience=patience,
    )
    started = time.monotonic()
    verdict = preflight.run(kernels, meeting, CPU, limit_s)
    return {"ok": verdict.ok, "fault": verdict.fault, "seconds": time.monotonic() - started}


def skip(kind: Kind, source: int, target: int, turn: int = 1) -> Any:
    """What ``source`` does for ``target`` is lost from the ``turn``-th time on."""

    def of(rank: int, meeting: Exchange) -> Any:
        def intercept(step: Step) -> bool:
            return not (rank == source and step.kind is kind and step.peer == target and step.epoch >= turn)

        return intercept

    return of


@pytest.mark.parametrize("size", [2, 3, 4])
def test_good_peers_pass(size: int, tmp_path: Path) -> None:
    outcomes, _ = ranks.run(try_it, size, tmp_path)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.output
        assert outcome.value["ok"], outcome.value


def test_the_waits_of_a_gpus_peers() -> None:
    """The tests stretch them by ``patience``; this is what they are stretched from."""
    assert preflight.LIMIT_S == 10 and preflight.PAIR_S + preflight.HOST_S < preflight.LIMIT_S / 2
    assert CudaKernels.patience == 1


@pytest.mark.parametrize("turn", [1, 3])
def test_a_lost_flag_ends_within_ten_seconds_and_names_the_pair(turn: int, tmp_path: Path) -> None:
    """rtx6kpro#15, #21: the flag never comes. Every rank falls back, and none spins."""
    lost = skip(Kind.PUBLISH, source=1, target=2, turn=turn)
    outcomes, _ = ranks.run(try_it, 3, tmp_path, lost, BRISK)
    verdicts = [outcome.value for outcome in outcomes]
    assert all(verdict is not None for verdict in verdicts), outcomes[0].output
    assert not any(verdict["ok"] for verdict in verdicts)
    assert max(verdict["seconds"] for verdict in verdicts) < 10
    fault = verdicts[0]["fault"]
    assert (fault.kind, fault.rank, fault.peer) == (cures.LOST, 2, 1)
    assert all(verdict["fault"] == fault for verdict in verdicts)


def lost_among_all(packets: bool) -> Any:
    """What rank 1 sends to rank 0 after the pairs is lost: its packets, or its flags from the fourth on, two-stage's."""
    kind = Kind.PUSH if packets else Kind.PUBLISH

    def of(rank: int, meeting: Exchange) -> Any:
        def intercept(step: Step) -> bool:
            met = step.epoch > preflight.TURNS or step.packets
            return not (
                rank == 1 and step.peer == 0 and step.kind is kind and step.packets == packets and met
            )

        return intercept

    return of


@pytest.mark.parametrize(
    ("packets", "words"),
    [(True, "not every packet came, packets on eager"), (False, "no flag came, two-stage on eager")],
)
def test_what_did_not_come_is_named(packets: bool, words: str, tmp_path: Path) -> None:
    outcomes, _ = ranks.run(try_it, 2, tmp_path, lost_among_all(packets), BRISK)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.output
        fault = outcome.value["fault"]
        assert (fault.kind, fault.rank, fault.peer, fault.detail) == (cures.LOST, 0, 1, words)


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_private_mirror_fails_closed(turn: int, tmp_path: Path) -> None:
    """NVIDIA/nccl#2338: the flag is seen, the data went somewhere else. Stale buffers count (turn 3 reuses one)."""
    mirror = skip(Kind.PUSH, source=1, target=0, turn=turn)
    outcomes, _ = ranks.run(try_it, 2, tmp_path, mirror, BRISK)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.output
        assert not outcome.value["ok"]
        fault = outcome.value["fault"]
        assert (fault.kind, fault.rank, fault.peer) == (cures.WRONG, 0, 1)


def late(until: Callable[[Exchange], object]) -> Any:
    """Rank 1 begins its first push when ``until`` has returned."""

    def of(rank: int, meeting: Exchange) -> Any:
        def intercept(step: Step) -> bool:
            if rank == 1 and step.kind is Kind.PUSH and step.epoch == 1 and not begun:
                begun.append(step)
                until(meeting)
            return True

        begun: list[Step] = []
        return intercept

    return of


def test_a_rank_that_is_late_but_in_time_passes(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(try_it, 2, tmp_path, late(lambda _: time.sleep(0.3)))
    assert all(outcome.value["ok"] for outcome in outcomes)


def test_a_rank_that_is_too_late_is_not_left_behind(tmp_path: Path) -> None:
    """It finds that the others have given up: going on alone is what would hang."""

    def rank_0_has_given_up(meeting: Exchange) -> None:
        meeting._store.wait(["one-shot/test/1/0"], timedelta(seconds=30))

    outcomes, _ = ranks.run(try_it, 2, tmp_path, late(rank_0_has_given_up), BRISK)
    assert [outcome.value["ok"] for outcome in outcomes] == [False, False]
    assert outcomes[0].value["fault"] == outcomes[1].value["fault"]


def die(rank_to_die: int) -> Any:
    def of(rank: int, meeting: Exchange) -> Any:
        def intercept(step: Step) -> bool:
            if rank == rank_to_die:
                os._exit(3)
            return True

        return intercept

    return of


@pytest.mark.parametrize(("size", "dead"), [(2, 1), (3, 1)])
def test_a_dead_rank_does_not_keep_the_others(size: int, dead: int, tmp_path: Path) -> None:
    outcomes, seconds = ranks.run(try_it, size, tmp_path, die(dead), 1.0, 1.0)
    assert outcomes[dead].status == 3
    for rank, outcome in enumerate(outcomes):
        if rank != dead:
            assert outcome.value is not None and not outcome.value["ok"], outcome.output
            fault = outcome.value["fault"]
            assert fault.kind in (cures.LOST, cures.LATE) and dead in (fault.rank, fault.peer)
    assert seconds < 25


def silent_zero(rank: int, size: int, folder: Path) -> str:
    if rank == 0:
        return "says nothing"  # and stays, with the store, until rank 1 is done
    meeting = exchange(rank, size)
    try:
        meeting.gather("x", 1, 0.5)
    except Silent as error:
        return str(error)
    return "no error"


def test_without_rank_0_there_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may go on by itself: a fallback that others do not share is a hang."""
    from sglang.srt.distributed.one_shot import exchange as module

    monkeypatch.setattr(module, "GRACE_S", 1.0)
    outcomes, _ = ranks.run(silent_zero, 2, tmp_path)
    assert "rank 0 did not answer" in outcomes[1].value


@pytest.mark.parametrize("size", range(2, 9))
def test_every_pair_meets_once(size: int) -> None:
    rounds = tournament(size)
    pairs = [pair for turn in rounds for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(size) for b in range(a + 1, size)]
    for turn in rounds:
        members = [rank for pair in turn for rank in pair]
        assert len(set(members)) == len(members)
    assert len(rounds) == (size - 1 if size % 2 == 0 else size)


def answer(kind: str, rank: int, peer: int = -1, turn: int = 1) -> dict[str, Any]:
    return {"fault": {"kind": kind, "rank": rank, "peer": peer, "detail": "", "turn": turn}}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([{"fault": None}, {"fault": None}], None),
        ([answer(cures.LOST, 0, 1), {"fault": None}], Fault(cures.LOST, 0, 1, turn=1)),
        ([answer(cures.LOST, 0, 1), answer(cures.WRONG, 1, 0)], Fault(cures.WRONG, 1, 0, turn=1)),
        ([answer(cures.LOST, 1, 0, 2), answer(cures.LOST, 0, 1, 1)], Fault(cures.LOST, 0, 1, turn=1)),
        ([{"fault": None}, None], Fault(cures.LATE, 1, -1, "no answer (x)")),
        ([answer(cures.LOST, 0, 1), None], Fault(cures.LOST, 0, 1, turn=1)),
    ],
)
def test_the_verdict_names_who_knows_most(answers: list[Any], expected: Fault | None) -> None:
    assert judge(answers, "x").fault == expected


def test_rank_0s_clock_is_everybodys() -> None:
    answers = [{"fault": None, "elapsed": 8.0}, {"fault": None, "elapsed": 1.0}]
    assert judge(answers, "x", 9.0).ok and judge(answers[::-1], "x", 7.0).ok
    fault = judge(answers, "x", 7.0).fault
    assert fault is not None and (fault.kind, fault.rank) == (cures.SLOW, 0)


def slow_but_right(rank: int, size: int, folder: Path) -> dict[str, Any]:
    def intercept(step: Step) -> bool:
        if step.kind is Kind.PUSH and rank == 0:
            time.sleep(0.25)
        return True

    kernels = SimulatedKernels(
        Fabric(size, ROOM, folder / "fabric"), rank, intercept=intercept, patience=PATIENT
    )
    started = time.monotonic()
    verdict = preflight.run(kernels, exchange(rank, size), CPU, limit_s=2.0 / PATIENT)
    return {"fault": verdict.fault, "seconds": time.monotonic() - started}


def test_a_path_that_works_slowly_does_not_stretch_the_preflight(tmp_path: Path) -> None:
    """Every single wait is within its own limit, and the sum of them is not."""
    outcomes, _ = ranks.run(slow_but_right, 2, tmp_path)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.output
        assert outcome.value["fault"].kind == cures.SLOW
    assert outcomes[0].value["fault"] == outcomes[1].value["fault"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_patterns_are_exact_and_tell_ranks_apart(dtype: torch.dtype) -> None:
    shape = (3, 1009)
    wide = [part(rank, 1, shape, torch.float32, CPU) for rank in range(8)]
    assert torch.equal(expected_sum(8, 1, shape, dtype, CPU).float(), torch.stack(wide).sum(0))
    both = part(2, 0, shape, dtype, CPU) + HIGH * part(5, 0, shape, dtype, CPU)
    assert torch.equal(both.float(), wide_pair(2, 5, shape))
    for other in range(1, 8):
        assert (wide[0] != wide[other]).float().mean() > 0.9
    assert min(float(one.min()) for one in wide) >= 1


def wide_pair(low: int, high: int, shape: tuple[int, int]) -> torch.Tensor:
    return part(low, 0, shape, torch.float32, CPU) + HIGH * part(high, 0, shape, torch.float32, CPU)
