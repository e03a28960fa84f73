"""``python -m sglang.bench_all_reduce``: measure this machine; ``--write`` keeps the table for servers."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sglang.bench_all_reduce import launch, report
from sglang.bench_all_reduce.worker import Job, Result
from sglang.bench_verify import environment
from sglang.bench_verify.rows import Results
from sglang.srt.distributed.one_shot import table_file, topology
from sglang.srt.distributed.one_shot.kernels import MAX_RANKS, MIN_RANKS

ROWS = (1, 3, 4, 6, 24, 48)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m sglang.bench_all_reduce", description=__doc__)
    made.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    made.add_argument("--ranks", type=int, help="number of ranks (default: all GPUs; 2 on a processor)")
    made.add_argument(
        "--devices", type=_numbers, help="GPU of each rank, as 0,1,2,3; equal ones are for tests"
    )
    made.add_argument(
        "--rows", type=_numbers, default=ROWS, help="tokens of the messages (default: %(default)s)"
    )
    made.add_argument("--hidden", type=int, default=7168, help="hidden size (default: that of Kimi-K2)")
    made.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    made.add_argument(
        "--repeats", type=int, default=5, help="figures of each message; the median is reported"
    )
    made.add_argument("--steps", type=int, default=50, help="reductions of one graph")
    made.add_argument(
        "--passes",
        type=int,
        default=2,
        choices=range(1, 10),
        metavar="N",
        help="rounds over all methods, every second one in reverse: an effect of the order shows (default: 2)",
    )
    made.add_argument(
        "--shapes",
        type=_numbers,
        default=(),
        help="shapes of calls in packets beside the default: up to 8 CTAs a row (fused; fewer where one would have no "
        "part of it), from 32 threads a CTA (sums)",
    )
    made.add_argument(
        "--methods",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="only these, as one-shot,packets,packets/2,nccl (default: all); a table needs one of upstream's",
    )
    made.add_argument(
        "--flashinfer",
        action="store_true",
        help="FlashInfer's fused all-reduce too (SM90, where its module is compiled already)",
    )
    made.add_argument("--limit-s", type=float, default=600.0, help="longest run; ranks are ended after it")
    made.add_argument("--machine", default="", help="short name of the machine for the rows")
    made.add_argument("--json", type=Path, help="write rows to this file, anew with every figure")
    made.add_argument("--write", action="store_true", help="write the table where servers look for it")
    made.add_argument("--table", type=Path, help="write the table to this file")
    made.add_argument("--quiet", action="store_true", help="only the tables")
    made.add_argument(
        "--no-multicast",
        action="store_true",
        help="keep torch and NCCL from making NVLink multicast objects, on machines that must not",
    )
    return made


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, as 1,3,4") from None


def devices(args: argparse.Namespace, visible: int) -> tuple[int, ...]:
    """GPU of each rank.

    Raises:
        ValueError: too few GPUs, or a number of ranks that the kernels do not serve.
    """
    if args.devices:
        chosen = tuple(args.devices)
    else:
        count = args.ranks or (2 if args.device == "cpu" else visible)
        if args.device == "cuda" and count > visible:
            raise ValueError(f"{count} ranks need {count} GPUs, {visible} are visible")
        chosen = tuple(range(count))
    if any(shape not in (1, 2, 4, 8, 32, 64, 128, 256, 512) for shape in args.shapes):
        raise ValueError(
            f"--shapes {args.shapes}: 1, 2, 4 or 8 CTAs a row, or 32 to 512 threads in powers of two"
        )
    if not MIN_RANKS <= len(chosen) <= MAX_RANKS:
        raise ValueError(f"{len(chosen)} ranks: an all-reduce of {MIN_RANKS} to {MAX_RANKS} is measured")
    if args.device == "cuda" and any(index >= visible for index in chosen):
        raise ValueError(f"GPU {max(chosen)} is not visible, {visible} are")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status is 2 for bad input and 1 where ranks failed."""
    args = parser().parse_args(argv)
    try:
        if args.write and args.device == "cpu":
            raise ValueError("a processor's figures are no table for a server; name a file with --table")
        chosen = devices(args, torch.cuda.device_count() if args.device == "cuda" else 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = topology.gather()
    for name, value in machine.describe():
        print(f"{name:>20}  {value}")
    if args.no_multicast:
        os.environ.update(launch.NO_MULTICAST)
    if args.device == "cuda":
        for name, value in launch.SERVER.items():
            os.environ.setdefault(name, value)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            devices=chosen,
            device=args.device,
            rows=tuple(args.rows),
            hidden=args.hidden,
            dtype=getattr(torch, args.dtype),
            repeats=args.repeats,
            steps=args.steps,
            address=launch.free_address(),
            folder=Path(folder),
            machine=machine,
            passes=args.passes,
            flashinfer=args.flashinfer,
            shapes=tuple(args.shapes),
            only=args.methods,
        )
        keep = _keeper(args, job, started)
        try:
            result = launch.run(job, args.limit_s, not args.quiet, keep)
        except launch.RankFailed as error:
            print(f"error: {error}", file=sys.stderr)
            if error.partial is not None and error.partial.figures:
                print("measured before that:")
                _report(job, error.partial)
                keep(error.partial)
            return 1
    _report(job, result)
    keep(result)
    if args.write or args.table:
        return _write(args, job, result, started)
    return 0


def _report(job: Job, result: Result) -> None:
    """Print facts and figures."""
    for name, value in result.facts:
        print(f"{name:>20}  {value}")
    print(report.text(job, result), flush=True)


def _keeper(args: argparse.Namespace, job: Job, started: str) -> Callable[[Result], None]:
    """What writes the rows so far to the file that was asked for, each time anew and in one step."""
    if not args.json:
        return lambda result: None
    environments = [environment.capture()]

    def keep(result: Result) -> None:
        results = Results(environments)
        for row in report.rows_of(job, result, args.machine or args.device, started):
            results.add(row)
        results.save(args.json)

    return keep


def _write(args: argparse.Namespace, job: Job, result: Result, started: str) -> int:
    try:
        table = report.table_of(job, result, started)
    except ValueError as error:
        print(f"error: no table: {error}", file=sys.stderr)
        return 1
    path = args.table or table_file.default_path(table.key)
    table_file.save(table, path, started)
    print(f"\ntable written to {path}")
    for name, value in table.describe():
        print(f"{name:>20}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
