"""``launch``: baseline, upstream-behaviour EAGLE-3 and fork EAGLE-3 in turn on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sglang.bench_verify import launch, measure
from sglang.bench_verify.client import ServerError
from sglang.bench_verify.commands.server import (
    chosen_prompts,
    conclude,
    interrupted,
    positive,
    prompt_arguments,
)
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.keeper import Keeper
from sglang.bench_verify.measure import Report
from sglang.bench_verify.progress import await_file, progress
from sglang.bench_verify.slice.engines import stock_topics
from sglang.fork import topics

START_WHEN_LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--model", required=True, help="target model")
    parser.add_argument("--draft", required=True, help="EAGLE-3 draft")
    parser.add_argument(
        "--steps",
        type=draft_steps,
        default=(2,),
        metavar="N[,N...]",
        help="draft steps; a verify has one token more. Of several, a server each, and the best one is named",
    )
    parser.add_argument("--servers", default="baseline,upstream,fork")
    parser.add_argument(
        "--disable",
        default=os.environ.get("SGLANG_FORK_DISABLE", ""),
        metavar="TOPIC,TOPIC",
        help="topics switched off in every server (default: SGLANG_FORK_DISABLE of this process)",
    )
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
    """What the turns of one run share: kept rows and start-up times."""

    def __init__(self, args: argparse.Namespace, report: Report, keeper: Keeper) -> None:
        self.args = args
        self.keeper = keeper
        self.startups: dict[str, list[float]] = {}
        self._prompts = chosen_prompts(args)
        self._report = report
        self._turns: Counter[str] = Counter()

    def started(self, running: launch.RunningServer) -> None:
        """A server came up."""
        self.startups.setdefault(running.plan.name, []).append(running.startup_s)

    def turn(self, running: launch.RunningServer) -> None:
        """Measure one server once. Raises LaunchError with the end of its log where it fails."""
        plan, args = running.plan, self.args
        record = capture()
        self.keeper.results.environments.append(record)
        self._turns[plan.name] += 1
        server = measure.Server(
            plan.name,
            args.machine,
            plan.variant,
            args.bench,
            plan.topics_off,
            len(self.keeper.results.environments) - 1,
            self._turns[plan.name],
        )
        try:
            width = measure.describe(running.client, record)
            with under_load(record):
                measure.run(
                    running.client,
                    server,
                    self._prompts,
                    args.tokens,
                    width,
                    args.rounds,
                    args.temperature,
                    self._report,
                    self.keeper,
                )
        except ServerError as error:
            raise running.why(error) from error


def run(args: argparse.Namespace) -> int:
    """Start, measure and stop each server; print tables and verdicts; write the rows.

    Status 1 when a server failed, 130 when interrupted; what was measured until then is printed and written.
    """
    names = [part.strip() for part in args.servers.split(",") if part.strip()]
    if not names:
        raise launch.LaunchError("--servers names no server")
    for path in (args.model, args.draft):
        if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
            raise launch.LaunchError(f"no model at {path}")
    try:
        extra = shlex.split(args.server_args)
    except ValueError as error:
        raise launch.LaunchError(f"--server-args: {error}") from error
    off = topics_named(args.disable)
    servers = launch.plans(args.model, args.draft, args.steps, names, stock_topics(), extra, off=off)
    keeper = Keeper(args.out)
    status = 0
    with tempfile.TemporaryDirectory() as scratch, progress("launch") as report:
        folder = Path(args.logs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        measured = Measurement(args, report, keeper)
        try:
            turns(servers, args, folder, Path(scratch) / "baseline.json", measured, report)
        except launch.LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = interrupted(keeper)
    conclude(keeper, f"{args.bench}_summary", "runs", status == 0, measured.startups)
    return status


def topics_named(text: str) -> tuple[str, ...]:
    """``a,b`` as topics of this fork. Raises LaunchError for one that it does not have."""
    wanted = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = [topic.name for topic in topics()]
    if known and (unknown := [name for name in wanted if name not in known]):
        raise launch.LaunchError(f"no topic {unknown[0]!r} to switch off; there are {', '.join(known)}")
    return wanted


def draft_steps(text: str) -> tuple[int, ...]:
    """``1,2,3`` as draft steps; raises ``argparse.ArgumentTypeError`` for none, or for less than 1."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


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
