"""``demo``: the shipped model on this machine's processor, with and without speculation.

No GPU, no download: the whole path of the product in a minute or two. Its speed says nothing about a GPU;
its accept length, its equal answers and its phase table are real.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang.bench_verify.commands import launch

MODELS = "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--models", default=MODELS, help="folder with nano, nano-eagle3 and prompts.jsonl")
    parser.add_argument("--servers", default="baseline,fork")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--logs", default="")
    parser.add_argument("--out", default="")


def run(args: argparse.Namespace) -> int:
    """Run ``launch`` with the shipped model on the CPU; status 2 when the model is not there."""
    folder = Path(args.models)
    if not (folder / "nano" / "config.json").exists():
        print(
            f"error: no model in {folder}: run from the repository's root, or name the folder with --models"
        )
        return 2
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    words = [
        "--model",
        str(folder / "nano"),
        "--draft",
        str(folder / "nano-eagle3"),
        "--servers",
        args.servers,
    ]
    words += [
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--count",
        str(args.count),
        "--tokens",
        str(args.tokens),
    ]
    words += ["--machine", "cpu", "--bench", "bench_demo", "--logs", args.logs, "--out", args.out]
    words += ["--server-args", "--device cpu --max-total-tokens 8192 --decode-log-interval 20"]
    if args.once:
        words.append("--once")
    return launch.run(parser.parse_args(words))
