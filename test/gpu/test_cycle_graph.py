"""The cycle graph on a GPU: thousands of replays against the eager program, and text against the split path.

Parts, each with a bound of its own: ``-k replays`` (``CYCLE_REPLAYS``, ``CYCLE_LIMIT_S`` each), ``-k text``. A lookup that
leaves its table ends a CUDA context, so every replay part runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPLAYS = int(os.environ.get("CYCLE_REPLAYS", "10000"))
LIMIT_S = float(os.environ.get("CYCLE_LIMIT_S", "150"))
TEXT_LIMIT_S = float(os.environ.get("CYCLE_TEXT_LIMIT_S", "300"))
HERE = Path(__file__).parent
HELPERS = HERE.parent / "engine" / "cycle_graph"


@pytest.mark.parametrize(
    ("shared", "drawn", "count"), ((1, 0, REPLAYS), (0, 0, REPLAYS // 10), (1, 1, REPLAYS // 20))
)
def test_replays_equal_the_eager_program(shared: int, drawn: int, count: int) -> None:
    command = [
        sys.executable,
        str(HERE / "cycle_replays.py"),
        str(shared),
        str(drawn),
        str(count),
        str(LIMIT_S),
    ]
    path = os.pathsep.join([str(HELPERS), *(part for part in sys.path if part)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT_S + 120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ran = json.loads(done.stdout.splitlines()[-1])
    print(ran)
    assert ran["replays"] == count, f"only {ran} before the limit: raise CYCLE_LIMIT_S"


@cache
def generate(off: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "SGLANG_FORK_DISABLE": off
    }
    command = [sys.executable, str(HERE / "cycle_text.py"), "96"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TEXT_LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"alone"')]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def test_text_alone_equals_the_split_path_token_for_token() -> None:
    found = generate("")
    assert found["alone"]["graph"] == found["alone"]["split"]
    assert found["verifies"]["graph"] == found["verifies"]["split"]


def test_text_in_batches_that_requests_join_and_leave() -> None:
    """Batches form by chance, and bf16 rounds by batch size: most texts are equal, none is nonsense."""
    found = generate("")["batch"]
    equal = sum(a == b for a, b in zip(found["graph"], found["split"], strict=True))
    print(f"{equal} of {len(found['graph'])} texts equal")
    assert 8 * equal >= 7 * len(found["graph"])


def test_text_came_from_one_graph_and_the_rest_was_counted() -> None:
    found = generate("")
    replays = sum(v for name, v in found["counters"].items() if name.startswith("cycle_graph_replays"))
    assert replays > 100
    assert set(found["fallbacks"].get("cycle-graph", {})) == {"a request has a logit bias"}
    assert found["sampled_accept"] > 1.2
