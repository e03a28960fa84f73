"""``launch``: baseline, upstream-behaviour EAGLE-3 and fork EAGLE-3 in turn on this machine."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from sglang.bench_verify import launch, measure
from sglang.bench_verify.client import ServerError
from sglang.bench_verify.commands.server import chosen_prompts, prompt_arguments
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.progress import progress
from sglang.bench_verify.rows import Results, Row
from sglang.bench_verify.show import five_runs, print_table
from sglang.bench_verify.slice.engines import stock_topics
from sglang.bench_verify.summary import server_verdicts, summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--model", required=True, help="target model")
    parser.add_argument("--draft", required=True, help="EAGLE-3 draft")
    parser.add_argument("--steps", type=int, default=2, help="draft steps; a verify has one token more")
    parser.add_argument("--servers", default="baseline,upstream,fork")
    parser.add_argument("--server-args", default="", help="further arguments of every server, as one string")
    parser.add_argument(
        "--once", action="store_true", help="start each server once instead of forth and back"
    )
    parser.add_argument("--machine", default="local", help="short name of the machine")
    parser.add_argument("--bench", default="launch", help="name of the bench in the rows")
    parser.add_argument("--logs", default="", help="folder for server logs (default: a temporary folder)")
    parser.add_argument("--out", default="", help="results file to write")
    prompt_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start, measure and stop each server; print tables and verdicts; write the rows."""
    names = [part.strip() for part in args.servers.split(",") if part.strip()]
    try:
        servers = launch.plans(
            args.model, args.draft, args.steps, names, stock_topics(), shlex.split(args.server_args)
        )
    except launch.LaunchError as error:
        print(f"error: {error}")
        return 2
    results = Results()
    rows: list[Row] = []
    startups: dict[str, list[float]] = {}
    prompts = chosen_prompts(args)
    with tempfile.TemporaryDirectory() as scratch, progress("launch") as report:
        folder = Path(args.logs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        baseline = Path(scratch) / "baseline.json"
        for index, plan in enumerate(launch.forth_and_back(servers, args.once)):
            report(f"starting {plan.name}", index, 2 * len(servers))
            try:
                with launch.RunningServer(plan, folder / f"{index}-{plan.name}.log", baseline) as running:
                    record = capture()
                    results.environments.append(record)
                    width = measure.describe(running.client, record)
                    server = measure.Server(
                        plan.name,
                        args.machine,
                        plan.variant,
                        args.bench,
                        plan.topics_off,
                        len(results.environments) - 1,
                        len(startups.get(plan.name, [])) + 1,
                    )
                    with under_load(record):
                        rows += measure.run(
                            running.client,
                            server,
                            prompts,
                            args.tokens,
                            width,
                            args.rounds,
                            args.temperature,
                            report,
                        )
                    startups.setdefault(plan.name, []).append(running.startup_s)
            except (launch.LaunchError, ServerError) as error:
                print(f"error: {error}")
                return 1
    summaries = summarise(rows, f"{args.bench}_summary", startups)
    for row in [*rows, *summaries]:
        results.add(row)
    print_table("runs", five_runs(rows))
    for line in server_verdicts(summaries):
        print(line)
    if args.out:
        results.save(args.out)
        print(f"rows written to {args.out}")
    return 0
