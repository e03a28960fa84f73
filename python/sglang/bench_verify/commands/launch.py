"""``launch``: baseline, upstream-behaviour EAGLE-3 and fork EAGLE-3 in turn on this machine."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sglang.bench_verify import launch, measure
from sglang.bench_verify.client import ServerError
from sglang.bench_verify.commands.server import chosen_prompts, prompt_arguments
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.measure import Report
from sglang.bench_verify.progress import await_file, progress
from sglang.bench_verify.rows import Results, Row
from sglang.bench_verify.show import five_runs, print_table
from sglang.bench_verify.slice.engines import stock_topics
from sglang.bench_verify.summary import server_verdicts, summarise

START_WHEN_LIMIT_S = 600.0


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
    parser.add_argument(
        "--resident",
        action="store_true",
        help="start all servers at once and measure them in turn (small models: they share the memory)",
    )
    parser.add_argument(
        "--start-when",
        default="",
        metavar="FILE",
        help="with --resident: measure once this file exists (other work is done)",
    )
    parser.add_argument("--machine", default="local", help="short name of the machine")
    parser.add_argument("--bench", default="launch", help="name of the bench in the rows")
    parser.add_argument("--logs", default="", help="folder for server logs (default: a temporary folder)")
    parser.add_argument("--out", default="", help="results file to write")
    prompt_arguments(parser)


class Measurement:
    """What the turns of one run share: results, rows, start-up times."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.args = args
        self.results = Results()
        self.rows: list[Row] = []
        self.startups: dict[str, list[float]] = {}
        self._prompts = chosen_prompts(args)
        self._report = report
        self._turns: Counter[str] = Counter()

    def started(self, running: launch.RunningServer) -> None:
        """A server came up."""
        self.startups.setdefault(running.plan.name, []).append(running.startup_s)

    def turn(self, running: launch.RunningServer) -> None:
        """Measure one server once."""
        plan, args = running.plan, self.args
        record = capture()
        self.results.environments.append(record)
        width = measure.describe(running.client, record)
        self._turns[plan.name] += 1
        server = measure.Server(
            plan.name,
            args.machine,
            plan.variant,
            args.bench,
            plan.topics_off,
            len(self.results.environments) - 1,
            self._turns[plan.name],
        )
        with under_load(record):
            self.rows += measure.run(
                running.client,
                server,
                self._prompts,
                args.tokens,
                width,
                args.rounds,
                args.temperature,
                self._report,
            )


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
    with tempfile.TemporaryDirectory() as scratch, progress("launch") as report:
        folder = Path(args.logs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        measured = Measurement(args, report)
        try:
            turns(servers, args, folder, Path(scratch) / "baseline.json", measured, report)
        except (launch.LaunchError, ServerError) as error:
            print(f"error: {error}")
            return 1
    rows = measured.rows
    summaries = summarise(rows, f"{args.bench}_summary", measured.startups)
    for row in [*rows, *summaries]:
        measured.results.add(row)
    print_table("runs", five_runs(rows))
    for line in server_verdicts(summaries):
        print(line)
    if args.out:
        measured.results.save(args.out)
        print(f"rows written to {args.out}")
    return 0


def turns(
    servers: Sequence[launch.ServerPlan],
    args: argparse.Namespace,
    folder: Path,
    baseline: Path,
    measured: Measurement,
    report: Report,
) -> None:
    """Every server's turns: all up together, or each started for each of its turns."""
    order = launch.forth_and_back(servers, args.once)
    if args.resident:
        report(f"starting {len(servers)} servers", 0, len(order))
        up = [launch.RunningServer(plan, folder / f"{plan.name}.log", baseline) for plan in servers]
        with launch.together(up):
            for running in up:
                measured.started(running)
            await_file(args.start_when, START_WHEN_LIMIT_S)
            for running in [next(one for one in up if one.plan is plan) for plan in order]:
                measured.turn(running)
        return
    for index, plan in enumerate(order):
        report(f"starting {plan.name}", index, len(order))
        with launch.RunningServer(plan, folder / f"{index}-{plan.name}.log", baseline) as running:
            measured.turn(running)
            measured.started(running)
