"""``demo``: the shipped model on this machine's processor, with and without speculation.

No GPU, no download: the whole path of the product in a minute or two. Its speed says nothing about a GPU;
its accept length, its equal answers and its phase table are real.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sglang.bench_verify.commands import launch
from sglang.bench_verify.commands.server import positive
from sglang.bench_verify.launch import LaunchError

MODELS = "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--models", default=MODELS, help="folder with nano, nano-eagle3 and prompts.jsonl")
    parser.add_argument("--servers", default="baseline,fork", help="of baseline, upstream, fork")
    parser.add_argument("--steps", default="2", help="draft steps, 1 to 4; of several, a server each")
    parser.add_argument("--disable", default=os.environ.get("SGLANG_FORK_DISABLE", ""), help="topics off")
    parser.add_argument("--prompts", default="", help="JSON Lines file (default: the model's own set)")
    parser.add_argument("--count", type=positive, default=5, help="prompts")
    parser.add_argument("--tokens", type=positive, default=96, help="most tokens of an answer")
    parser.add_argument("--once", action="store_true", help="each server once, not forth and back")
    parser.add_argument("--resident", action="store_true", help="all servers up at once, measured in turn")
    parser.add_argument("--logs", default="", help="folder for server logs (default: a temporary folder)")
    parser.add_argument("--out", default="", help="results file to write")


def run(args: argparse.Namespace) -> int:
    """Run ``launch`` with the shipped model on the CPU; status 2 when the model is not there."""
    folder = Path(args.models)
    if not (folder / "nano" / "config.json").exists():
        raise LaunchError(
            f"no model in {folder}: run from the repository's root, or name the folder with --models"
        )
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    pairs = {
        "--model": folder / "nano",
        "--draft": folder / "nano-eagle3",
        "--prompts": args.prompts or folder / "prompts.jsonl",
        "--servers": args.servers,
        "--steps": args.steps,
        "--disable": args.disable,
        "--count": args.count,
        "--tokens": args.tokens,
        "--machine": "cpu",
        "--bench": "bench_demo",
        "--logs": args.logs,
        "--out": args.out,
        "--server-args": "--device cpu --max-total-tokens 8192 --decode-log-interval 20",
    }
    words = [word for option, value in pairs.items() for word in (option, str(value))]
    switches = {"--once": args.once, "--resident": args.resident}
    words += [option for option, wanted in switches.items() if wanted]
    return launch.run(parser.parse_args(words))
