"""``python -m sglang.bench_all_reduce.start_probe``: which step of upstream's two-GPU start hangs, and what cures it.

Upstream's start between its first log line about ranks and the first captured graph is a chain of steps without
time limits. The probe runs the steps one by one in two processes, each bounded, under the settings that upstream
forces and under one change at a time. A step that does not end leaves the stacks of both ranks, is skipped, and the
rest goes on in fresh processes, so that one run answers for all of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang.bench_all_reduce.launch import NO_MULTICAST, SERVER, free_address
from sglang.bench_all_reduce.start_steps import STEPS, Context
from sglang.srt.distributed.one_shot import start_places

#: As a server's ranks have it, and NCCL's own log.
UPSTREAM = {**SERVER, "NCCL_DEBUG": "INFO"}
#: One change at a time; None removes a variable.
VARIANTS: Mapping[str, Mapping[str, str | None]] = {
    "as upstream": {},
    "NCCL_CUMEM_ENABLE=1": {"NCCL_CUMEM_ENABLE": "1"},
    "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"},
    "no CUDA_DEVICE_MAX_CONNECTIONS": {"CUDA_DEVICE_MAX_CONNECTIONS": None},
    "TORCH_SYMM_MEM_DISABLE_MULTICAST=1": {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
}
BASE = "as upstream"
BAD = ("hung", "failed")
RANKS = 2
#: Between a step's limit, at which its stacks are written, and the end of its ranks.
GRACE_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """One step under one variant: ``state`` is ok, failed, hung or skipped; seconds of the slower rank."""

    variant: str
    step: str
    state: str
    seconds: float = 0.0
    detail: str = ""


def conclude(outcomes: Sequence[Outcome], slow_s: float = 30.0) -> list[str]:
    """What the outcomes say, in sentences; pure, so that it can be tried without a GPU."""
    by = {(outcome.variant, outcome.step): outcome for outcome in outcomes}
    lines = []
    for outcome in outcomes:
        if outcome.variant != BASE or outcome.state not in BAD:
            if outcome.variant == BASE and outcome.state == "ok" and outcome.seconds >= slow_s:
                lines.append(
                    f"{outcome.step}: slow, not hung ({outcome.seconds:.0f} s): {outcome.detail}".rstrip(": ")
                )
            continue
        others = [
            variant
            for variant in VARIANTS
            if variant != BASE
            and by.get((variant, outcome.step), outcome).state in ("ok", *BAD)
            and (variant, outcome.step) in by
        ]
        cures = [variant for variant in others if by[variant, outcome.step].state == "ok"]
        what = f"{outcome.step}: {outcome.state} under upstream's settings"
        if cures:
            lines.append(f"{what}; passes with {', '.join(cures)}")
        elif others:
            lines.append(f"{what}, and with every change that was tried: not a matter of these settings")
        else:
            lines.append(f"{what}; no other settings were tried")
        if outcome.detail:
            lines.append(f"  {outcome.detail}")
    return lines or ["every step ended under upstream's settings: the hang did not show itself"]


def cure(outcomes: Sequence[Outcome]) -> str:
    """What to do about the first step that did not end well under upstream's settings."""
    first = next(entry for entry in outcomes if entry.variant == BASE and entry.state in BAD)
    passing = [
        entry.variant
        for entry in outcomes
        if entry.variant != BASE and entry.step == first.step and entry.state == "ok"
    ]
    places = [
        place.switch for place in start_places.PLACES if place.switch and f"at {place.name}," in first.detail
    ]
    words = [f"start with {passing[0]}"] if passing else []
    words += [f"start with {switch}" for switch in dict.fromkeys(places)]
    return "; or ".join(words) or "see the logs of the probe"


def environment(variant: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank under a variant; the user's own NCCL settings stay, as they do upstream."""
    made = {**UPSTREAM, **inherited}
    for name, value in VARIANTS[variant].items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def run_variant(
    variant: str,
    folder: Path,
    limit_s: float,
    restarts: int = 4,
    deadline: float = float("inf"),
    until: str = "",
) -> list[Outcome]:
    """All steps under one variant. A hung step is skipped in the next round of processes.

    Args:
        variant: a key of ``VARIANTS``.
        folder: for what the ranks write.
        limit_s: longest step.
        restarts: rounds after the first.
        deadline: no round begins after it (monotonic clock); what was not reached is ``skipped``.
        until: the last step that is wanted; the later ones are left out.
    """
    found: dict[str, Outcome] = {}
    names = [step.name for step in STEPS]
    after = names[names.index(until) + 1 :] if until else []
    for _ in range(restarts + 1):
        if time.monotonic() > deadline:
            break
        skip = [name for name, outcome in found.items() if outcome.state == "hung"] + after
        outcomes = _round(variant, folder, limit_s, skip)
        for outcome in outcomes:
            if outcome.state != "skipped":
                found[outcome.step] = outcome
        if not any(outcome.state == "hung" for outcome in outcomes):
            break
    return [found.get(step.name, Outcome(variant, step.name, "skipped")) for step in STEPS]


def _round(variant: str, folder: Path, limit_s: float, skip: Sequence[str]) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    place = Path(tempfile.mkdtemp(dir=folder))
    address = free_address()
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment(variant, before))
    try:
        ranks = [
            context.Process(target=_rank, args=(rank, address, place, limit_s, list(skip)), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    while any(process.is_alive() for process in ranks) and not _stuck(place, limit_s):
        time.sleep(0.2)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join(5)
    return _read(variant, place, skip)


def _records(place: Path, rank: int) -> list[dict[str, Any]]:
    try:
        text = (place / f"{rank}.jsonl").read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _stuck(place: Path, limit_s: float) -> bool:
    for rank in range(RANKS):
        records = _records(place, rank)
        if (
            records
            and records[-1]["state"] == "begun"
            and time.time() - records[-1]["at"] > limit_s + GRACE_S
        ):
            return True
    return False


def _read(variant: str, place: Path, skip: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for step in STEPS:
        if step.name in skip:
            outcomes.append(Outcome(variant, step.name, "skipped"))
            continue
        mine = [
            record
            for rank in range(RANKS)
            for record in _records(place, rank)[::-1][:1000]
            if record["step"] == step.name
        ]
        ended = [record for record in mine if record["state"] != "begun"]
        begun = [record for record in mine if record["state"] == "begun"]
        failed = [record for record in ended if record["state"] == "failed"]
        seconds = max((record["seconds"] for record in ended), default=0.0)
        if not begun:
            outcomes.append(Outcome(variant, step.name, "skipped"))
        elif failed:
            outcomes.append(Outcome(variant, step.name, "failed", seconds, failed[0]["detail"]))
        elif len(ended) < len(begun):
            outcomes.append(Outcome(variant, step.name, "hung", seconds, _where(place)))
        else:
            outcomes.append(Outcome(variant, step.name, "ok", seconds, ended[0]["detail"]))
    return outcomes


def _where(place: Path) -> str:
    """Where each rank of a hung round stands, and the files that hold its stacks."""
    words, files = [], []
    for file in sorted(place.glob("*.stacks")):
        stacks = start_places.of_dump(file.read_text(encoding="utf-8", errors="replace"))
        if not stacks:
            continue
        files.append(str(file))
        # The main thread is printed last; a step runs there.
        found = start_places.identify(stacks[-1])
        innermost = (start_places.frames_of(stacks[-1]) or [("", "an unknown frame")])[-1][1]
        where = f"at {found.name}, waits for {found.waits_for}" if found else f"in {innermost}"
        words.append(f"rank {file.stem} {where}")
    return "; ".join([*words, f"stacks: {', '.join(files)}"]) if files else "no stacks"


def _rank(rank: int, address: str, place: Path, limit_s: float, skip: Sequence[str]) -> None:
    stacks = (place / f"{rank}.stacks").open("w")
    output = os.open(place / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    records = (place / f"{rank}.jsonl").open("a", buffering=1)

    def note(step: str, state: str, seconds: float = 0.0, detail: str = "") -> None:
        entry = {"step": step, "state": state, "at": time.time(), "seconds": seconds, "detail": detail}
        records.write(json.dumps(entry) + "\n")

    context = Context(rank, RANKS, address)
    for step in STEPS:
        if step.name in skip:
            continue
        note(step.name, "begun")
        faulthandler.dump_traceback_later(limit_s, file=stacks)
        start = time.monotonic()
        try:
            detail = step.work(context)
        except Exception as error:
            note(step.name, "failed", time.monotonic() - start, f"{type(error).__name__}: {error}"[:500])
            if step.needed:
                os._exit(1)
        else:
            note(step.name, "ok", time.monotonic() - start, detail)
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and say what follows; 0 where every step ended under upstream's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="longest step before its stacks are written"
    )
    parser.add_argument(
        "--variants",
        nargs="*",
        choices=list(VARIANTS),
        help="settings to try (default: upstream's; the others only up to the first step that did not end well)",
    )
    parser.add_argument("--total-s", type=float, default=420.0, help="no new round of ranks begins after it")
    parser.add_argument(
        "--no-multicast",
        action="store_true",
        help="keep torch and NCCL from making NVLink multicast objects, on machines that must not",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for logs, stacks and outcomes.json (default: a new one)"
    )
    args = parser.parse_args(argv)
    import torch

    if torch.cuda.device_count() < RANKS:
        print(f"error: {RANKS} GPUs are needed, {torch.cuda.device_count()} are visible", file=sys.stderr)
        return 2
    folder = args.out or Path(tempfile.mkdtemp(prefix="start-probe-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.no_multicast:
        os.environ.update(NO_MULTICAST)
    outcomes = probe(args.variants, folder, args.limit_s, time.monotonic() + args.total_s)
    print("\n" + "\n".join(conclude(outcomes)) + f"\n\nlogs, stacks and outcomes: {folder}")
    return int(any(entry.variant == BASE and entry.state in BAD for entry in outcomes))


def probe(variants: Sequence[str] | None, folder: Path, limit_s: float, deadline: float) -> list[Outcome]:
    """Run variants one after the other; print and save each as soon as it is done.

    Args:
        variants: which; None: upstream's settings, and the changes only where a step did not end well, up to it.
    """
    outcomes: list[Outcome] = []
    first_bad = ""
    for variant in VARIANTS if variants is None else variants:
        if variants is None and variant != BASE and not first_bad:
            continue
        print(f"\n{variant}", flush=True)
        for outcome in run_variant(variant, folder, limit_s, deadline=deadline, until=first_bad):
            outcomes.append(outcome)
            print(
                f"  {outcome.step:<45}{outcome.state:<9}{outcome.seconds:7.1f} s  {outcome.detail}",
                flush=True,
            )
        if variants is None and variant == BASE:
            first_bad = next((entry.step for entry in outcomes if entry.state in BAD), "")
        save(outcomes, folder / "outcomes.json")
        save(outcomes, last())
    return outcomes


def last() -> Path:
    """Where the doctor finds the last probe of this user."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "sglang-fork" / "start-probe" / "outcomes.json"


def save(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write outcomes as JSON in one step; a folder that cannot be written is said and no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
        scratch.write_text(
            json.dumps([asdict(entry) for entry in outcomes], indent=1) + "\n", encoding="utf-8"
        )
        os.replace(scratch, path)
    except OSError as error:
        print(f"  not written: {path} ({error})", file=sys.stderr)


def load(path: Path) -> list[Outcome]:
    """What ``save`` wrote; empty where there is no such file or it is none of these."""
    try:
        return [Outcome(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


if __name__ == "__main__":
    sys.exit(main())
