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

from sglang.bench_all_reduce.launch import free_address
from sglang.bench_all_reduce.start_steps import STEPS, Context

#: What upstream's launcher sets when the user did not (entrypoints/engine.py, _set_envs_and_config).
UPSTREAM = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_DEBUG": "INFO",
}
#: One change at a time; None removes a variable.
VARIANTS: Mapping[str, Mapping[str, str | None]] = {
    "as upstream": {},
    "NCCL_CUMEM_ENABLE=1": {"NCCL_CUMEM_ENABLE": "1"},
    "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"},
    "no CUDA_DEVICE_MAX_CONNECTIONS": {"CUDA_DEVICE_MAX_CONNECTIONS": None},
}
BASE = "as upstream"
RANKS = 2


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
        if outcome.variant != BASE or outcome.state not in ("hung", "failed"):
            if outcome.variant == BASE and outcome.state == "ok" and outcome.seconds >= slow_s:
                lines.append(
                    f"{outcome.step}: slow, not hung ({outcome.seconds:.0f} s): {outcome.detail}".rstrip(": ")
                )
            continue
        others = [variant for variant in VARIANTS if variant != BASE and (variant, outcome.step) in by]
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


def environment(variant: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank under a variant; the user's own NCCL settings stay, as they do upstream."""
    made = {**UPSTREAM, **inherited}
    for name, value in VARIANTS[variant].items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def run_variant(variant: str, folder: Path, limit_s: float, restarts: int = 4) -> list[Outcome]:
    """All steps under one variant. A hung step is skipped in the next round of processes."""
    found: dict[str, Outcome] = {}
    for _ in range(restarts + 1):
        skip = [name for name, outcome in found.items() if outcome.state == "hung"]
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
        if records and records[-1]["state"] == "begun" and time.time() - records[-1]["at"] > limit_s + 15:
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
            stacks = ", ".join(str(file) for file in sorted(place.glob("*.stacks")) if file.stat().st_size)
            outcomes.append(
                Outcome(variant, step.name, "hung", seconds, f"stacks: {stacks}" if stacks else "")
            )
        else:
            outcomes.append(Outcome(variant, step.name, "ok", seconds, ended[0]["detail"]))
    return outcomes


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
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
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
    outcomes: list[Outcome] = []
    for variant in args.variants:
        print(f"\n{variant}", flush=True)
        for outcome in run_variant(variant, folder, args.limit_s):
            outcomes.append(outcome)
            print(
                f"  {outcome.step:<45}{outcome.state:<9}{outcome.seconds:7.1f} s  {outcome.detail}",
                flush=True,
            )
    (folder / "outcomes.json").write_text(json.dumps([asdict(entry) for entry in outcomes], indent=1) + "\n")
    print("\n" + "\n".join(conclude(outcomes)) + f"\n\nlogs, stacks and outcomes: {folder}")
    return int(any(entry.variant == BASE and entry.state in ("hung", "failed") for entry in outcomes))


if __name__ == "__main__":
    sys.exit(main())
