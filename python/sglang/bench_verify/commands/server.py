"""``server URL``: measure a server that is already running."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from sglang.bench_verify import measure, prompts
from sglang.bench_verify.client import Client, ServerError
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.keeper import UNFINISHED, Keeper
from sglang.bench_verify.progress import progress
from sglang.bench_verify.prompts import Prompt
from sglang.bench_verify.show import five_runs, print_table
from sglang.bench_verify.summary import best_length, server_verdicts, summarise


def positive(text: str) -> int:
    """A whole number from 1; raises ``argparse.ArgumentTypeError`` for anything else."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return number


def prompt_arguments(parser: argparse.ArgumentParser, tokens: int = 512) -> None:
    """Arguments about the text that both commands share."""
    parser.add_argument("--prompts", default="", help="JSON Lines file (default: the shipped set)")
    parser.add_argument("--kinds", default="chat,code,maths,long", help="kinds of the shipped set")
    parser.add_argument("--count", type=positive, default=5, help="prompts, taken from the kinds in turn")
    parser.add_argument("--rounds", type=positive, default=1, help="answers to each prompt")
    parser.add_argument(
        "--tokens", type=positive, default=tokens, help="most tokens of an answer; it may end earlier"
    )
    parser.add_argument("--temperature", type=float, default=0.0)


def chosen_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts that the arguments name."""
    if args.prompts:
        return prompts.pick(prompts.read(args.prompts), args.count)
    kinds: Sequence[str] = [part.strip() for part in args.kinds.split(",") if part.strip()]
    return prompts.pick(prompts.shipped(kinds), args.count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("url", help="address of the server, for example http://127.0.0.1:30000")
    parser.add_argument(
        "--name", default="", help="name of the server in the rows (default: baseline or eagle3)"
    )
    parser.add_argument("--machine", default="local", help="short name of the machine")
    parser.add_argument("--variant", default="fork", choices=("fork", "upstream"))
    parser.add_argument("--out", default="", help="results file to write")
    prompt_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the five-run table and the verdict, write the rows; status 1 when the server failed."""
    wanted = chosen_prompts(args)
    keeper = Keeper(args.out)
    client = Client(args.url)
    keeper.results.environments.append(capture())
    record = keeper.results.environments[0]
    status = 0
    try:
        width = measure.describe(client, record)
        name = args.name or ("eagle3" if width else "baseline")
        off = tuple(topic for topic, state in record.topics.items() if state == "off")
        server = measure.Server(name, args.machine, args.variant, topics_off=off)
        with progress("server") as report, under_load(record):
            measure.run(
                client, server, wanted, args.tokens, width, args.rounds, args.temperature, report, keeper
            )
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = interrupted(keeper)
    conclude(keeper, "server_summary", f"{args.url}", complete=status == 0)
    return status


def interrupted(keeper: Keeper) -> int:
    """Tell the caller what an interrupt has left; the exit status."""
    print(f"interrupted after {len(keeper.results.rows)} rows", file=sys.stderr)
    return 130


def conclude(
    keeper: Keeper,
    bench: str,
    title: str,
    complete: bool,
    startups: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Print the table and the verdicts of what was measured, and write it with its summaries."""
    rows = list(keeper.results.rows)
    if not rows:
        return
    summaries = summarise(rows, bench, startups)
    if not complete:
        summaries = [
            dataclasses.replace(row, note="; ".join(part for part in (UNFINISHED, row.note) if part))
            for row in summaries
        ]
    print_table(title, five_runs(rows))
    for line in server_verdicts(summaries):
        print(line)
    if best := best_length(summaries):
        print(best)
    if not complete:
        print(UNFINISHED)
    keeper.finish(summaries)
