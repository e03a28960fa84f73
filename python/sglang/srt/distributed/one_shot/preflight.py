"""Before the path is trusted: a pattern between every two ranks through the real kernel, then sums of all ranks.

Peer access that the driver reports as fine may hang, or may write into a private mirror that its owner never sees.
Only the owner's own check tells, so every rank checks what arrived in its memory. Waits are bounded in the kernel
(``limit_s``) and on the host; the verdict is rank 0's, so that no rank uses what another has given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sglang.srt.distributed.one_shot import cures
from sglang.srt.distributed.one_shot.errors import OneShotError, PeerTimeout
from sglang.srt.distributed.one_shot.exchange import Exchange
from sglang.srt.distributed.one_shot.kernels import OneShotKernels
from sglang.srt.distributed.one_shot.patterns import HIGH, expected_sum, part, rms_reference
from sglang.srt.distributed.one_shot.protocol import Variant

LIMIT_S = 10.0
WORKSPACE = "preflight"
#: Reductions of one pair: both buffers, and the first one again, which shows whether it is really rewritten.
TURNS = 3
#: Longest wait of one pair inside the kernel.
PAIR_S = 1.0
#: What the host adds to the kernel's own limit before it calls the kernel hung.
HOST_S = 2.0


@dataclass(frozen=True)
class Fault:
    """What one rank saw go wrong. ``peer`` is -1 where no single peer is to blame, ``turn`` counts from 1."""

    kind: str
    rank: int
    peer: int
    detail: str = ""
    turn: int = 0


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on. ``wedged`` means that a kernel did not end and the GPU cannot be relied on."""

    ok: bool
    fault: Fault | None = None
    seconds: float = 0.0
    wedged: bool = False


class Hung(OneShotError):
    """A kernel did not end after its own time limit, nor after it was told to stop."""


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds whose pairs share no rank (the circle method)."""
    players: list[int | None] = list(range(size)) + ([None] if size % 2 else [])
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        rounds.append(
            [
                (min(a, b), max(a, b))
                for a, b in zip(players[:half], reversed(players[half:]), strict=True)
                if a is not None and b is not None
            ]
        )
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def run(
    kernels: OneShotKernels, exchange: Exchange, device: torch.device, limit_s: float = LIMIT_S
) -> Verdict:
    """Try every pair, then all ranks on every workspace. Collective; the same verdict on every rank.

    Args:
        kernels: opened on all ranks.
        exchange: of the same group.
        device: where this rank's tensors live.
        limit_s: for the whole preflight; ``kernels.patience`` stretches it, and the longest wait of one pair.

    Raises:
        Silent: rank 0 fell silent, so that there is no verdict.
    """
    start = time.monotonic()
    pair_s, limit_s = PAIR_S * kernels.patience, limit_s * kernels.patience
    steps: list[tuple[str, Callable[[], Fault | None]]] = []
    for index, pairs in enumerate(tournament(exchange.size)):
        mine = next((pair for pair in pairs if exchange.rank in pair), None)
        steps.append((f"pairs, round {index + 1}", _pair_step(kernels, device, exchange.rank, mine)))
    for workspace in kernels.workspaces:
        if workspace != WORKSPACE:
            steps.append(
                (
                    f"all ranks, {workspace}",
                    lambda name=workspace: _together(kernels, device, exchange, name),  # type: ignore[misc]
                )
            )
    for number, (label, step) in enumerate(steps, 1):
        answer = _guarded(step, exchange.rank)
        answer["elapsed"] = time.monotonic() - start
        left = max(limit_s - answer["elapsed"], pair_s + HOST_S)
        # A step is begun only if the limit holds even where its kernels run into theirs.
        allowed = limit_s if number == len(steps) else max(limit_s - pair_s - HOST_S, limit_s / 2)
        verdict = judge(exchange.gather(label, answer, left), label, allowed)
        if not verdict.ok:
            return Verdict(False, verdict.fault, time.monotonic() - start, verdict.wedged)
    return Verdict(True, None, time.monotonic() - start)


def judge(answers: Sequence[Any], label: str, allowed_s: float = float("inf")) -> Verdict:
    """The verdict on one round of answers: the earliest fault, and of one turn the one that names most.

    A rank that stops after a fault leaves its peer waiting in the next turn: the later fault is the echo. Rank 0's
    clock is everybody's: where it is past ``allowed_s`` and nothing is wrong, the preflight ends as too slow.
    """
    faults = [Fault(**answer["fault"]) for answer in answers if answer is not None and answer.get("fault")]
    wedged = any(answer is not None and answer.get("wedged") for answer in answers)
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if silent:
        faults.append(Fault(cures.LATE, silent[0], -1, f"no answer ({label})"))
    if not faults:
        elapsed = float((answers[0] or {}).get("elapsed", 0.0))
        if elapsed <= allowed_s:
            return Verdict(True)
        faults = [Fault(cures.SLOW, 0, -1, f"{elapsed:.1f} s and not done ({label})")]
    order = (cures.WRONG, cures.LOST, cures.REFUSED, cures.KERNEL, cures.SUM, cures.SLOW, cures.LATE)
    first = min(faults, key=lambda fault: (fault.kind == cures.LATE, fault.turn, order.index(fault.kind)))
    return Verdict(False, first, wedged=wedged)


def _guarded(step: Callable[[], Fault | None], rank: int) -> dict[str, Any]:
    """A step's outcome as JSON; whatever it raises is a fault, since the other ranks have to hear of it."""
    try:
        fault = step()
    except Hung as error:
        return {"fault": asdict(Fault(cures.LOST, rank, -1, str(error))), "wedged": True}
    except PeerTimeout as error:
        return {"fault": asdict(_lost(error, "no flag came"))}
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return {"fault": asdict(Fault(cures.KERNEL, rank, -1, text))}
    return {"fault": asdict(fault)} if fault else {"fault": None}


def _lost(error: PeerTimeout, what: str) -> Fault:
    return Fault(cures.LOST, error.rank, error.peer, what, error.epoch)


def _name(variant: Variant) -> str:
    """As tables and settings write it."""
    return str(variant.value).replace("_", "-")


def _pair_step(
    kernels: OneShotKernels, device: torch.device, rank: int, pair: tuple[int, int] | None
) -> Callable[[], Fault | None]:
    pair_s = PAIR_S * kernels.patience

    def step() -> Fault | None:
        if pair is None:
            return None
        low, high = pair
        peer = high if rank == low else low
        spec = kernels.workspaces[WORKSPACE]
        for turn in range(TURNS):
            shape = (spec.max_rows, spec.max_hidden)
            mine = part(rank, turn, shape, torch.bfloat16, device) * (HIGH if rank == high else 1)
            got = torch.full_like(mine, float("nan"))
            kernels.all_reduce(mine, out=got, workspace=WORKSPACE, limit_s=pair_s, members=pair)
            settle(kernels, device, pair_s + HOST_S)
            kernels.check(WORKSPACE)
            wanted = part(low, turn, shape, torch.bfloat16, device) + HIGH * part(
                high, turn, shape, torch.bfloat16, device
            )
            wrong = int((got != wanted).sum())
            if wrong:
                return Fault(
                    cures.WRONG,
                    rank,
                    peer,
                    f"a flag came, but {wrong} of {got.numel()} values are not the peer's",
                    turn + 1,
                )
        return None

    return step


def _together(
    kernels: OneShotKernels, device: torch.device, exchange: Exchange, workspace: str
) -> Fault | None:
    # Two calls a turn: both buffers of each variant.
    order = (Variant.ONE_SHOT, Variant.TWO_STAGE, Variant.PACKETS, Variant.ONE_SHOT)
    for turn, variant in enumerate(order):
        try:
            fault = _turn(kernels, device, exchange, workspace, turn, variant)
        except PeerTimeout as error:
            # What is awaited is the variant's: with packets there are no flags that could come.
            what = "not every packet" if variant is Variant.PACKETS else "no flag"
            return _lost(error, f"{what} came, {_name(variant)} on {workspace}")
        if fault is not None:
            return fault
    return None


def _turn(
    kernels: OneShotKernels,
    device: torch.device,
    exchange: Exchange,
    workspace: str,
    turn: int,
    variant: Variant,
) -> Fault | None:
    """A sum and a sum with add and norm of all ranks.

    Raises:
        PeerTimeout: something of a peer did not come.
        Hung: as ``settle``.
    """
    rank, size = exchange.rank, exchange.size
    pair_s = PAIR_S * kernels.patience
    shape = (3, min(kernels.workspaces[workspace].max_hidden, 7168))
    mine = part(rank, turn, shape, torch.bfloat16, device)
    wanted = expected_sum(size, turn, shape, torch.bfloat16, device)
    got = kernels.all_reduce(mine, workspace=workspace, variant=variant, limit_s=pair_s)
    residual, weight = torch.ones_like(mine), torch.full_like(mine[0], 0.5)
    normed, kept = kernels.all_reduce_rms_norm(
        mine, residual, weight, 1e-6, workspace=workspace, variant=variant, limit_s=pair_s
    )
    settle(kernels, device, pair_s + HOST_S)
    kernels.check(workspace)
    if not torch.equal(got, wanted):
        return Fault(cures.SUM, rank, -1, f"{_name(variant)} sum on {workspace}")
    if not torch.equal(kept, wanted + residual):
        return Fault(cures.SUM, rank, -1, f"{_name(variant)} residual on {workspace}")
    if not torch.allclose(normed.float(), rms_reference(kept, weight, 1e-6), rtol=2**-7, atol=2**-7):
        return Fault(cures.SUM, rank, -1, f"{_name(variant)} norm on {workspace}")
    return None


def settle(kernels: OneShotKernels, device: torch.device, limit_s: float) -> None:
    """Wait until the current stream is done, at most ``limit_s``; a synchronise could not be given up on.

    Raises:
        Hung: the kernel neither ended by itself nor after ``kernels.abort()``.
    """
    if device.type != "cuda":
        return
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    for last in (False, True):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if event.query():
                if last:
                    raise OneShotError("the kernel ended only when it was told to")
                return
            time.sleep(0.0005)
        if not last:
            kernels.abort()
    raise Hung("the kernel does not end: the GPU may need a reset")
