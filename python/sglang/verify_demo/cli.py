"""The demo from arguments to exit status: two servers one after the other, one table, one results file."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sglang.verify_demo.client import Client, Prompt, question
from sglang.verify_demo.figures import Run, differences, summary
from sglang.verify_demo.process import Server, ServerError, free_port

OK, DIFFERENT, FAILED, INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Command line."""
    made = argparse.ArgumentParser(prog="python -m sglang.verify_demo", description=__doc__)
    add = made.add_argument
    add("--model-path", required=True, help="target: a folder or a name that the server can load")
    add("--draft-path", required=True, help="EAGLE-3 draft of that target")
    add(
        "--prompts",
        type=Path,
        required=True,
        help="JSON lines, each with messages (chat) or prompt (plain text)",
    )
    add(
        "--count",
        type=int,
        default=35,
        help="prompts compared token by token, every kind of the file in turn",
    )
    add("--show", type=int, default=5, help="of these, prompts whose answers are streamed to the screen")
    add("--tokens", type=int, default=96, help="most tokens an answer")
    add("--parallel", type=int, default=4, help="requests at a time in the comparison")
    add("--steps", type=int, default=2, help="drafts a cycle; one more token than that is verified")
    add("--device", default="cpu")
    add("--dtype", default="float32", help="float32 makes equality exact; bfloat16 may part at near-ties")
    add("--port", type=int, help="default: a free one")
    add("--timeout", type=float, default=600.0, help="seconds a server may take to start")
    add("--logs", type=Path, default=Path("build/demo"), help="folder of the servers' logs")
    add("--out", type=Path, help="results file to write (JSON rows)")
    add(
        "--server-arg",
        action="append",
        default=[],
        help="further argument of both servers, e.g. --server-arg=--tp=2",
    )
    return made


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """`count` prompts of the file, kind by kind in turn, so that even a few show every kind.

    Raises ValueError naming the file, the line and what is missing.
    """
    kinds: dict[str, list[Prompt]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        if "prompt" not in row and not row.get("messages"):
            raise ValueError(f"{path}:{number}: neither messages nor prompt")
        kinds.setdefault(row.get("kind", ""), []).append(row)
    if not kinds or count < 1:
        raise ValueError(f"{path}: {len(kinds)} kinds of prompts, {count} prompts wanted; need one at least")
    turns = itertools.zip_longest(*kinds.values())
    return [row for turn in turns for row in turn if row is not None][:count]


def server_command(args: argparse.Namespace, port: int, *, speculative: bool) -> list[str]:
    """The command of one server; without speculation the same but for the speculative flags."""
    command = [sys.executable, "-m", "sglang.launch_server", "--device", args.device, "--dtype", args.dtype]
    command += ["--model-path", args.model_path, "--host", "127.0.0.1", "--port", str(port), *args.server_arg]
    if speculative:
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", args.draft_path]
        command += ["--speculative-num-steps", str(args.steps), "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-draft-tokens", str(args.steps + 1)]
    return command


def run_server(console: Any, args: argparse.Namespace, prompts: list[Prompt], *, speculative: bool) -> Run:
    """Start a server, stream the first answers, collect all of them with token ids, stop it."""
    from sglang.verify_demo import show

    run = Run("with EAGLE-3" if speculative else "without speculation")
    port = args.port or free_port()
    log = args.logs / ("speculative.log" if speculative else "plain.log")
    client = Client(port)
    console.rule(f"[bold]server {run.name}[/], port {port}, log {log}")
    with Server(server_command(args, port, speculative=speculative), log) as server:
        try:
            run.startup_s = show.wait_healthy(console, server, client, run.name, args.timeout)
            console.print(f"  healthy after {run.startup_s:.1f} s", highlight=False)
            client.answer(prompts[-1], 8)  # the first request of a server pays for what is loaded lazily
            for prompt in prompts[: args.show]:
                show.print_question(console, question(prompt))
                run.streamed.append(
                    client.stream(prompt, args.tokens, lambda piece: _type_out(console, piece))
                )
                console.print()
            with show.bar(console) as progress:
                task = progress.add_task("the same prompts and more, with token ids", total=len(prompts))
                for part, parallel in ((prompts[: args.show], 1), (prompts[args.show :], args.parallel)):
                    run.collected += client.answers(
                        part, args.tokens, parallel, lambda: progress.advance(task)
                    )
        except Exception:
            server.check()  # if the server went away, its log says more than a broken connection
            raise
        finally:
            client.close()
    run.peak_bytes = server.peak_bytes
    return run


def _type_out(console: Any, piece: str) -> None:
    console.out(piece, end="", highlight=False)
    console.file.flush()


def save(path: Path, args: argparse.Namespace, figures: dict[str, Any], started: str) -> None:
    """Write the results file that the headline and the README's tables are made from.

    Two rows of bench `demo_summary`: with speculation (`draft_tokens` = steps + 1) and without (0).
    """
    from sglang.bench_verify.environment import capture
    from sglang.bench_verify.rows import Metric, Results, Row

    results = Results(environments=[capture()])
    for draft_tokens, prefix in ((args.steps + 1, ""), (0, "plain_")):
        units = {"tok_s": "tok/s", "startup_s": "s", "peak_bytes": "bytes"}
        metrics = {name: Metric(float(figures[prefix + name]), unit) for name, unit in units.items()}
        # Milliseconds of a machine that others use are larger; this tells a reader how many waited for a CPU.
        counters: dict[str, Any] = {"load_average_5m": round(os.getloadavg()[1], 1)}
        if draft_tokens:
            told = {"accept_length": "tokens", "cycle_ms": "ms", "token_ms": "ms"}
            metrics |= {name: Metric(float(figures[name]), unit) for name, unit in told.items()}
            shares = enumerate(figures["by_position"], 1)
            metrics |= {f"right_up_to_{place}": Metric(share, "ratio") for place, share in shares}
            counters |= {f"kept_{right + 1}": count for right, count in enumerate(figures["histogram"])}
            counters |= {name: figures[name] for name in ("prompts", "tokens", "differing")}
        else:
            metrics["decode_ms"] = Metric(float(figures["decode_ms"]), "ms")
        case = {
            "model": Path(args.model_path).name,
            "draft_tokens": draft_tokens,
            "batch": 1,
            "dtype": args.dtype,
            "prompts": figures["prompts"],
            "max_tokens": args.tokens,
        }
        row = Row(
            bench="demo_summary",
            machine=args.device,
            variant="fork",
            case=case,
            metrics=metrics,
            phases_ms=figures["phases_ms"] if draft_tokens else {},
            counters=counters,
            started=started,
            note="tokens a second on a CPU are no performance claim",
        )
        results.add(row)
    results.save(path)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. 0: equal; 1: tokens differ; 2: a server or an input failed; 130: interrupted."""
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminate)  # `kill` must stop the servers as Ctrl-C does
    from rich.console import Console
    from sglang.verify_demo import show

    console, started = Console(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the second start reads what the first compiled
    try:
        prompts = read_prompts(args.prompts, args.count)
        speculative = run_server(console, args, prompts, speculative=True)
        plain = run_server(console, args, prompts, speculative=False)
    except KeyboardInterrupt:
        console.print("\ninterrupted; the servers are stopped")
        return INTERRUPTED
    except (ServerError, OSError, ValueError, RuntimeError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return FAILED
    figures = summary(speculative, plain)
    console.print(show.closing_table(figures, args.dtype))
    console.print("accept lengths, cycles:", highlight=False)
    for line in show.histogram_lines(figures["histogram"]):
        console.print(line, highlight=False)
    console.print(show.NO_CLAIM, style="italic")
    if args.out is not None:
        save(args.out, args, figures, started)
        console.print(f"written to {args.out}", highlight=False)
    found = differences(speculative.collected, plain.collected)
    show.print_differences(console, prompts, found)
    return DIFFERENT if found else OK
