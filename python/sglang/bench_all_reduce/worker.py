"""One rank of the bench: opens the kernels, runs the preflight, measures, and hands rank 0 the slowest figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.bench_all_reduce import flashinfer_fused, measure, methods, upstream
from sglang.bench_all_reduce.methods import CUSTOM, GLOO, NCCL, Method
from sglang.srt.distributed.one_shot import cures, fusion_build, preflight
from sglang.srt.distributed.one_shot.attach import explain
from sglang.srt.distributed.one_shot.errors import OneShotError
from sglang.srt.distributed.one_shot.exchange import Exchange
from sglang.srt.distributed.one_shot.kernels import WORKSPACES, OneShotKernels, admit
from sglang.srt.distributed.one_shot.topology import Topology


@dataclass(frozen=True)
class Job:
    """What every rank of a run is told.

    Attributes:
        devices: GPU of each rank; equal numbers put ranks on one GPU (tests).
        device: ``cuda`` or ``cpu``.
        rows, hidden, dtype: of the messages.
        repeats, steps: figures a message, reductions a figure.
        address: where the ranks meet.
        folder: for the simulated peers of a processor.
        machine: facts, for the cure of a failed preflight.
        passes: rounds over all methods, every second one in reverse, so that an effect of the order shows.
        flashinfer: measure FlashInfer's fused all-reduce too.
        shapes: of calls in packets, to be measured beside the default (``methods.ours``).
        only: names of the methods to measure; none: all of them.
    """

    devices: tuple[int, ...]
    device: str
    rows: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    repeats: int
    steps: int
    address: str
    folder: Path
    machine: Topology
    passes: int = 1
    flashinfer: bool = False
    shapes: tuple[int, ...] = ()
    only: tuple[str, ...] = ()


Case = tuple[str, str, int]
#: How the reason of a figure begins that was given up because a device stood still, or because the ranks no longer
#: agree on how many calls a channel has made (from then on a rank takes what belongs to another call), or because a
#: rank gave up in a figure that went on.
STILL, APART, ENDED = "stood still", "counters differ", "a wait ended by itself"
#: Of the kernels, in this order: a workspace in which a figure stood still is not used again.
SPACES = (methods.WORKSPACE, "draft", "eager")


@dataclass
class Result:
    """What rank 0 reports, by (method, kind, rows).

    Attributes:
        figures: us of a step in a chain of reductions, of all passes; each of the slowest rank.
        between: us that a step adds among other kernels, likewise; none on a processor.
        passes: how many of the figures each pass has.
        nodes: graph nodes of a step by kind, an average over a graph's steps.
        missing: why there are no figures.
        variants: fork or upstream, by (method, kind).
        facts: of this run.
        gpu: name.
    """

    figures: dict[Case, list[float]] = field(default_factory=dict)
    between: dict[Case, list[float]] = field(default_factory=dict)
    passes: int = 1
    nodes: dict[Case, dict[str, float]] = field(default_factory=dict)
    missing: dict[Case, str] = field(default_factory=dict)
    variants: dict[tuple[str, str], str] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    gpu: str = ""


def work(rank: int, job: Job, report: Callable[[str, Result], None]) -> Result:
    """Measure on this rank. Collective.

    Args:
        rank: of this process.
        job: the same on all ranks.
        report: called before each message with what comes, and what was measured so far.

    Raises:
        Silent: a rank did not answer.
    """
    size = len(job.devices)
    device = torch.device("cuda", job.devices[rank]) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=job.address, rank=rank, world_size=size)
    exchange = Exchange(dist.distributed_c10d._get_default_store(), rank, size, "bench")
    result = Result(gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    kernels, missing = _kernels(job, rank, device, exchange, result)
    others, spaces = _stock(job, rank, device, exchange), list(SPACES)

    def all_methods() -> list[Method]:
        ours = methods.ours(kernels, missing, spaces[0] if spaces else SPACES[0], job.shapes)
        return [method for method in ours + others if not job.only or method.name in job.only]

    found = all_methods()
    result.variants = {(method.name, method.kind): method.variant for method in found}
    order = list(range(len(found)))
    for turn in range(job.passes):
        for at in order[:: -1 if turn % 2 else 1]:
            for rows in job.rows:
                method = found[at]
                key = (method.name, method.kind, rows)
                why = result.missing.get(key) or method.missing or _outside(method, rows, job, size)
                if not why and method.variant == "fork" and not spaces:
                    why = "no workspace is left in which nothing stood still"
                if why:
                    result.missing[key] = why
                    continue
                report(f"pass {turn + 1}: {method.name} {method.kind}, {rows} rows", result)
                x = torch.zeros(rows, job.hidden, dtype=job.dtype, device=device)
                try:
                    mine = measure.samples(method, x, job.repeats, _meet, job.steps)
                except measure.StoodStill as error:
                    space = spaces.pop(0) if method.variant == "fork" else ""
                    result.missing[key] = _give_up(kernels, space, exchange, key, str(error))
                    report(f"given up: {result.missing[key]}", result)
                    found = all_methods()
                    continue
                mine_of = _after(kernels, spaces[0]) if method.variant == "fork" else ["", []]
                everyone = exchange.require(f"{key} {turn}", [mine.chain, mine.between, *mine_of], 300.0)
                unsound = _unsound([(words, made) for _, _, words, made in everyone])
                if unsound:
                    spaces.pop(0)
                    result.missing[key] = unsound
                    report(f"given up: {unsound}", result)
                    found = all_methods()
                    continue
                figures = [each[:2] for each in everyone]
                _keep(result, key, figures, {kind: n / job.steps for kind, n in mine.nodes.items()})
        result.passes = turn + 1
    report("done", result)
    return result


def _meet(well: bool) -> bool:
    """Whether all ranks are well; nobody leaves before everybody is here."""
    least = torch.tensor([int(well)])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least.item())


def _give_up(kernels: OneShotKernels | None, space: str, exchange: Exchange, key: Case, words: str) -> str:
    """End what stands still on this rank's device, and say what each rank knows of it. Collective.

    Args:
        kernels: of this fork, or None.
        space: the workspace in use; "" for a method of upstream's, which nothing here can end.
        exchange, key: of the bench, and of the figure.
        words: what this rank saw.

    Raises:
        RuntimeError: the device of a rank did not end its work: nothing else can be measured.
    """
    counters: list[int] = []
    if kernels is not None and space:
        # A rank that ended its waits by itself, before this, sends nothing to the others any more.
        try:
            kernels.check(space)
        except OneShotError as error:
            words = f"before the abort: {error}"
        kernels.abort(space)
    ended = measure.settled()
    if ended and kernels is not None and space:
        try:
            kernels.check(space)
        except OneShotError as error:
            words = words if words.startswith("before") else str(error)
        counters = _made(kernels, space)
    answers = exchange.require(f"{key} stood still", [ended, words, counters], 60.0)
    told = "; ".join(f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers))
    if answers[0][2]:
        told += f"; {_apart([made for _, _, made in answers]) or 'all counters agree'}"
    if not all(done for done, _, _ in answers):
        raise RuntimeError(f"{key} stood still, and a device did not end its work: {told}")
    return f"{STILL} ({told})"


def _made(kernels: OneShotKernels | None, space: str) -> list[int]:
    """How many calls each channel of this rank has made; [] where that cannot be asked. The device must be done."""
    return kernels.counters(space) if kernels is not None and hasattr(kernels, "counters") else []


def _after(kernels: OneShotKernels | None, space: str) -> list[Any]:
    """What a figure left in a workspace of this rank: the words of a wait that ended by itself, and the counters."""
    words = ""
    if kernels is not None:
        try:
            kernels.check(space)
        except OneShotError as error:
            words = str(error)
    return [words, _made(kernels, space)]


def _unsound(left: list[tuple[str, list[int]]]) -> str:
    """Why figures mean nothing although every rank has them; "" if they do.

    A workspace that gave up makes every later call short. A channel that exchanged nothing in this shape would show
    that its counters differ in the next shape only, as a hang.
    """
    ended = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(left) if words]
    return f"{ENDED} ({'; '.join(ended)})" if ended else _apart([made for _, made in left])


def _apart(made: list[list[int]]) -> str:
    """Which channels' counters are not the same on every rank, and what they are; "" if all agree."""
    longest = max(map(len, made))
    channels = {n: [each[n] if n < len(each) else None for each in made] for n in range(longest)}
    found = {n: values for n, values in channels.items() if len(set(values)) > 1}
    if not found:
        return ""
    n, values = next(iter(found.items()))
    return f"{APART} in channels {list(found)} (channel {n}: {values} by rank)"


def _keep(result: Result, key: Case, everyone: list[list[list[float]]], nodes: dict[str, float]) -> None:
    """Add one pass. A reduction is done when its slowest rank is."""
    for kept, ranks in zip((result.figures, result.between), zip(*everyone, strict=True), strict=True):
        slowest = [max(column) for column in zip(*ranks, strict=True)]
        if slowest:
            kept[key] = [*kept.get(key, []), *slowest]
    if nodes:
        result.nodes[key] = nodes


def _outside(method: Method, rows: int, job: Job, size: int) -> str:
    if method.variant != "fork":
        return ""
    spec, variant = WORKSPACES[methods.WORKSPACE], methods.variant_of(method.name)
    return admit(rows, job.hidden, job.dtype, size, spec, variant=variant).reason


def _kernels(
    job: Job, rank: int, device: torch.device, exchange: Exchange, result: Result
) -> tuple[OneShotKernels | None, str]:
    kernels: OneShotKernels | None = None
    problem = ""
    try:
        kernels = _open(job, rank, device)
    except (OneShotError, OSError, RuntimeError, ValueError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    problems = [text for text in exchange.require("kernels", problem or "-", 600.0) if text != "-"]
    if kernels is None or problems:
        result.facts.append(("one-shot", problems[0]))
        return None, problems[0]
    start = time.monotonic()
    verdict = preflight.run(kernels, exchange, device)
    if verdict.fault is not None:
        line = explain(verdict.fault, job.machine, list(job.devices))
        result.facts.append(("preflight", f"{line.reason}: {line.detail}"))
        if verdict.wedged:
            raise RuntimeError(f"{line.detail}; reset the GPU, then {cures.P2P_OFF}")
        return None, line.reason
    result.facts += [("preflight", f"passed in {time.monotonic() - start:.2f} s"), *kernels.describe()]
    return kernels, ""


def _open(job: Job, rank: int, device: torch.device) -> OneShotKernels:
    if device.type == "cuda":
        from sglang.srt.distributed.one_shot.kernels import open_kernels

        assert dist.group.WORLD is not None
        return open_kernels(dist.group.WORLD, device)
    from sglang.srt.distributed.one_shot.simulated import Fabric, SimulatedKernels

    return SimulatedKernels(Fabric(len(job.devices), WORKSPACES, job.folder / "fabric"), rank)


def _stock(job: Job, rank: int, device: torch.device, exchange: Exchange) -> list[Method]:
    if device.type == "cpu":
        return methods.stock(GLOO, _gloo)
    if len(set(job.devices)) < len(job.devices):
        why = "several ranks on one GPU"
        return methods.absent(NCCL, why) + methods.absent(CUSTOM, why)
    size, local_rank = len(job.devices), job.devices[rank]
    upstream.as_a_server(rank, size, local_rank, job.address, "nccl")
    plain, _ = upstream.coordinator(size, local_rank, "nccl", custom=False)
    found = methods.stock(NCCL, plain.all_reduce, plain.graph_capture)
    group, refused = upstream.coordinator(size, local_rank, "nccl", custom=True)
    # One rank without it would leave the others waiting.
    refusals = [text for text in exchange.require("custom", refused or "-", 600.0) if text != "-"]
    if refusals:
        found += methods.absent(CUSTOM, refusals[0])
    else:
        found += methods.stock(CUSTOM, group.all_reduce, group.graph_capture)
    return [*found, _flashinfer(job, rank, plain.device_group, exchange)] if job.flashinfer else found


def _flashinfer(job: Job, rank: int, group: Any, exchange: Exchange) -> Method:
    workspace: Any = None
    capability = torch.cuda.get_device_capability(job.devices[rank])
    problem = flashinfer_fused.reason_against(fusion_build.look(), capability)
    problems = [text for text in exchange.require("flashinfer", problem or "-", 600.0) if text != "-"]
    if not problems:
        try:
            workspace = flashinfer_fused.open_workspace(rank, len(job.devices), job.hidden, job.dtype, group)
        except Exception as error:  # what is not there is a missing row, not the end of the bench
            problem = f"{type(error).__name__}: {error}"[:300]
        opened = exchange.require("flashinfer workspace", problem or "-", 600.0)
        problems = [text for text in opened if text != "-"]
    return flashinfer_fused.absent(problems[0]) if problems else flashinfer_fused.method(workspace)


def _gloo(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x
