"""``server URL``: measure a server that is already running."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang.bench_verify import measure, prompts
from sglang.bench_verify.client import Client, ServerError
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.progress import progress
from sglang.bench_verify.prompts import Prompt
from sglang.bench_verify.rows import Results
from sglang.bench_verify.show import five_runs, print_table
from sglang.bench_verify.summary import server_verdicts, summarise


def prompt_arguments(parser: argparse.ArgumentParser, tokens: int = 512) -> None:
    """Arguments about the text that both commands share."""
    parser.add_argument("--prompts", default="", help="JSON Lines file (default: the shipped set)")
    parser.add_argument("--kinds", default="chat,code,maths,long", help="kinds of the shipped set")
    parser.add_argument("--count", type=int, default=5, help="prompts, taken from the kinds in turn")
    parser.add_argument("--rounds", type=int, default=1, help="answers to each prompt")
    parser.add_argument(
        "--tokens", type=int, default=tokens, help="most tokens of an answer; it may end earlier"
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
    """Measure, print the five-run table and the verdict, write the rows."""
    client = Client(args.url)
    results = Results(environments=[capture()])
    record = results.environments[0]
    try:
        width = measure.describe(client, record)
        name = args.name or ("eagle3" if width else "baseline")
        off = tuple(topic for topic, state in record.topics.items() if state == "off")
        server = measure.Server(name, args.machine, args.variant, topics_off=off)
        with progress("server") as report, under_load(record):
            rows = measure.run(
                client,
                server,
                chosen_prompts(args),
                args.tokens,
                width,
                args.rounds,
                args.temperature,
                report,
            )
    except ServerError as error:
        print(f"error: {error}")
        return 1
    summaries = summarise(rows, "server_summary")
    for row in [*rows, *summaries]:
        results.add(row)
    print_table(f"{args.url}", five_runs(rows))
    for line in server_verdicts(summaries):
        print(line)
    if args.out:
        results.save(args.out)
        print(f"rows written to {args.out}")
    return 0
