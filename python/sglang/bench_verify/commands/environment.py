"""``environment``: print the environment record of this machine and process."""

from __future__ import annotations

import argparse
import dataclasses
import json

from sglang.bench_verify.environment import capture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command: none."""


def run(args: argparse.Namespace) -> int:
    """Print the record as JSON."""
    print(json.dumps(dataclasses.asdict(capture()), indent=1))
    return 0
