"""The cycle as one eager program in a real CPU server says what upstream's split path says, token for token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DIFFERENTIAL = HERE.parent / "differential"
LIMIT_S = 900
sys.path[:0] = [str(HERE), str(HERE.parent)]

pytest.importorskip("sglang")
pytestmark = pytest.mark.server


@cache
def generate(off: str, folder: Path) -> dict[str, Any]:
    import eager_cycle

    sys.path.insert(0, str(DIFFERENTIAL))
    import overlapped_cpu
    from plugin_entry import declare

    declare(folder, eager_cycle.ENTRY)
    declare(folder, overlapped_cpu.ENTRY)
    paths = [str(folder), str(HERE), str(DIFFERENTIAL), *(p for p in sys.path if p)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_PLUGINS": f"{eager_cycle.ENTRY},{overlapped_cpu.ENTRY}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_FORK_DISABLE": off,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "cpu_text.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"outputs"')]
    assert lines, done.stderr[-4000:]
    assert overlapped_cpu.MARK in done.stderr and eager_cycle.MARK in done.stderr
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugins")


def test_same_tokens_as_the_split_path(folder: Path) -> None:
    whole, split = generate("", folder), generate("cycle-graph", folder)
    assert whole["outputs"] == split["outputs"]
    assert whole["verifies"] == split["verifies"]


def test_steps_that_need_the_host_are_counted_by_reason(folder: Path) -> None:
    found = generate("", folder)
    replays = sum(
        value for name, value in found["counters"].items() if name.startswith("cycle_graph_replays")
    )
    assert replays > 20
    assert set(found["fallbacks"]) >= {"a request has a grammar", "a request has penalties or min_new_tokens"}
    assert found["graph_replays"]["cycle"] == replays


def test_sampled_requests_run_as_one_too(folder: Path) -> None:
    found = generate("", folder)
    assert found["drawn"] >= 10 and found["drawn_tokens"] == 30
    assert generate("cycle-graph", folder)["drawn"] == 0


def test_phases_of_a_cycle_are_told_apart(folder: Path) -> None:
    phases = generate("", folder)["cycle"][0]
    assert {"draft_ms", "verify_ms", "sample_ms", "draft_extend_ms"} <= set(phases)
    assert phases["verify_ms"] > 0


def test_control_the_topic_off_runs_no_cycle(folder: Path) -> None:
    found = generate("cycle-graph", folder)
    assert not any(name.startswith("cycle_graph_replays") for name in found["counters"])
    assert found["fallbacks"] == {}
