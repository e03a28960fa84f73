"""``slice``: a tensor-parallel rank of a large model on one GPU, upstream's behaviour against the fork's."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

from sglang.bench_verify.commands.server import interrupted, positive
from sglang.bench_verify.environment import Rank, capture, under_load
from sglang.bench_verify.errors import BenchError
from sglang.bench_verify.keeper import Keeper
from sglang.bench_verify.progress import await_file, progress
from sglang.bench_verify.rows import VARIANTS, Results, Row
from sglang.bench_verify.show import print_table, print_verdicts, slice_rows
from sglang.bench_verify.slice import plan as plans
from sglang.bench_verify.slice.derived import statistics_cost
from sglang.bench_verify.slice.engines import EngineError, Fleet, SliceOptions
from sglang.bench_verify.slice.shapes import find, rank_slice
from sglang.bench_verify.verdict import DEFAULT_RATES, verdicts

# Draft steps that the bench compares, and target layers that an EAGLE-3 draft of default layers needs.
MOST_STEPS = 4
FEWEST_LAYERS = 7


def numbers(text: str) -> tuple[int, ...]:
    """``1k,16k,65536`` as numbers of tokens."""
    found = []
    for part in text.split(","):
        part = part.strip().lower()
        found.append(int(part[:-1]) * 1024 if part.endswith("k") else int(part))
    return tuple(found)


def rates(text: str) -> tuple[float, ...]:
    """``0.7,0.4`` as shares; raises ``argparse.ArgumentTypeError`` where they are none or grow with the position."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if any(not 0 <= rate <= 1 for rate in found) or list(found) != sorted(found, reverse=True):
        raise argparse.ArgumentTypeError(
            f"{text!r}: each share lies between 0 and 1 and is no larger than the one before"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--model", default="kimi-k2.5", help="kimi-k2.5, deepseek-v3, or a config.json")
    parser.add_argument("--tp", type=int, default=8, help="ranks of the deployment that the slice is one of")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--experts", type=int, help="experts kept (default: all; 64 fit four engines on one GPU)"
    )
    parser.add_argument(
        "--contexts", type=numbers, default=(1024, 16384, 65536), help="for example 1k,16k,64k"
    )
    parser.add_argument("--batches", type=numbers, default=(1,))
    parser.add_argument(
        "--most-tokens",
        type=numbers,
        default=(0,),
        help="leave out cases of more tokens, context times batch (default: none)",
    )
    parser.add_argument("--start-seconds", type=float, default=300.0, help="time limit of the start")
    parser.add_argument("--steps", type=numbers, default=(0, 2), help="draft steps, 0 to 4; 0 = plain decode")
    parser.add_argument("--variants", default="upstream,fork")
    parser.add_argument(
        "--upstream-package", default="", help="folder of a clean upstream sglang (default: topics off)"
    )
    parser.add_argument("--accept-length", type=float, default=2.0, help="simulated; 0 = real acceptance")
    parser.add_argument(
        "--accept-rates",
        type=rates,
        default=DEFAULT_RATES,
        metavar="R1,R2,...",
        help="share of cycles that keep draft 1, 2, ..., from which the best draft length follows (a real one is in "
        "a server's spec_kept_by_position; default: %(default)s)",
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of the measurements")
    parser.add_argument(
        "--start-when", default="", metavar="FILE", help="measure once this file exists (other work is done)"
    )
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--dummy-router", action="store_true", help="leave the router's logits as dummy weights give them"
    )
    parser.add_argument(
        "--machine", default="h200", help="short name of the machine, first part of headline names"
    )
    parser.add_argument(
        "--series", default="", help="name of a series of figures of its own; draft-lengths has a table"
    )
    parser.add_argument(
        "--folder", default="", help="where the dummy models lie (default: a temporary folder)"
    )
    parser.add_argument("--out", default="", help="results file to write")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdicts, write the rows; status 1 when nothing could be measured."""
    shape = rank_slice(find(args.model), args.tp, args.layers, args.experts)
    plan = plans.SlicePlan(
        contexts=args.contexts,
        batches=args.batches,
        steps=args.steps,
        variants=tuple(part.strip() for part in args.variants.split(",")),
        rounds=args.rounds,
        tokens=args.tokens,
        seconds=args.seconds,
        most_tokens=args.most_tokens[0],
    )
    if not plan.cases():
        raise BenchError("--most-tokens leaves no case; raise it or give smaller --contexts")
    if unknown := [name for name in plan.variants if name not in VARIANTS]:
        raise BenchError(f"--variants {unknown[0]!r} is not one of {', '.join(VARIANTS)}")
    if max(plan.steps) > MOST_STEPS:
        raise BenchError(f"--steps {max(plan.steps)} is above {MOST_STEPS}")
    if any(plan.steps) and shape.layers < FEWEST_LAYERS:
        raise BenchError(
            f"--layers {shape.layers}: a draft reads the target behind layers 2, half and last but three, which are "
            f"distinct from {FEWEST_LAYERS} layers on; raise it, or measure --steps 0 alone"
        )
    options = SliceOptions(
        device=args.device,
        backend=args.backend,
        dtype=args.dtype,
        pool_tokens=plans.pool_tokens(plan),
        max_batch=max(plan.batches),
        random_router=not args.dummy_router,
        start_limit_s=args.start_seconds,
    )
    specs = plans.specs(plan, args.accept_length or None, args.upstream_package)
    keeper = Keeper(args.out)
    results = keeper.results
    results.environments.append(capture())
    rows: list[Row] = []
    failures: dict[str, str] = {}
    status = 0

    def keep(row: Row) -> None:
        row = _with_state(fleet, row, results)
        if args.series:
            row = dataclasses.replace(row, case={**row.case, "series": args.series})
        rows.append(row)
        keeper(row)

    with tempfile.TemporaryDirectory() as scratch, progress("slice") as report:
        report(f"starting {len(specs)} engines", 0, 1)
        try:
            with Fleet(shape, specs, args.folder or scratch, options) as fleet:
                print(f"{len(fleet.engines)} of {len(specs)} engines up", flush=True)
                failures = fleet.failures
                await_file(args.start_when, args.start_seconds)
                with under_load(results.environments[0]):
                    plans.run(fleet, plan, args.machine, report, keep)
        except KeyboardInterrupt:
            status = interrupted(keeper)
    if rows:
        print_table(f"{shape.name}, {shape.layers} layers, {shape.experts} experts", slice_rows(rows))
        print_verdicts(verdicts(rows, args.accept_rates))
    for name, reason in failures.items():
        print(f"not measured: {name}: {last_line(reason)}")
    keeper.finish(statistics_cost(rows))
    return status or (0 if rows else 1)


def last_line(text: str) -> str:
    """Where an engine that ended says why; what stands above it are warnings and the way there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def _with_state(fleet: Fleet, row: Row, results: Results) -> Row:
    """Add what the engine says about itself: fallbacks, counters, capture times; ranks go to the record."""
    engine = next(
        (
            item
            for item in fleet.engines.values()
            if item.spec.variant == row.variant and item.spec.draft_tokens == row.case["draft_tokens"]
        ),
        None,
    )
    if engine is None:
        return row
    try:
        state = engine.state()
    except EngineError:
        return row
    counters = dict(row.counters)
    for path, reasons in state.get("fallbacks", {}).items():
        for reason, count in reasons.items():
            counters[f"fallback.{path}: {reason}"] = count
    for name, value in state.get("counters", {}).items():
        counters[f"count.{name}"] = value
    for kind, seconds in state.get("graph_capture_s", {}).items():
        counters[f"capture_s.{kind}"] = seconds
    record = results.environments[row.environment]
    if not record.ranks:
        record.ranks = [Rank.from_json(item) for item in state.get("ranks", [])]
    return dataclasses.replace(row, counters=counters)
