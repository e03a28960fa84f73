"""A planted regression in real runs: `diff` names a topic that was off and a variable that changed.

The committed records are three runs of ``python -m sglang.bench_verify demo --servers fork --once --count 4 --tokens 10`` on
a CPU: as it is, with ``--disable run-end``, and with ``NCCL_P2P_LEVEL=SYS``. Their times are those of a busy machine and
mean nothing; what the topic changes is not a time. Without ``run-end`` the stop inside the last accepted run loses against
``max_new_tokens`` (sglang#31599), so one answer is longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.bench_verify.diff import Report, compare, render
from sglang.bench_verify.rows import Results

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmark/results/planted"
TOPIC, VARIABLE = "run-end", "NCCL_P2P_LEVEL"
COMMAND = ("demo", "--servers", "fork", "--once", "--count", "4", "--tokens", "10")


def check_topic(report: Report) -> None:
    """The topic is named, is the strongest suspect, and what it does is among what moved."""
    assert report.suspects[0].name == f"topic.{TOPIC}" and report.suspects[0].weight == 3
    assert f"topic.{TOPIC}" in render(report).splitlines()[-1]
    assert any(item.metric == "completion_tokens" and "prompt=fact-001" in item.case for item in report.moved)


def check_variable(report: Report) -> None:
    """The variable is named, as exported and as each rank read it back; with one rank it is no suspect, and why is said."""
    named = {item.name: item for item in report.differences}
    for name in (f"variable.{VARIABLE}", f"rank.{VARIABLE}"):
        assert (named[name].a, named[name].b) == ("(not set)", "SYS")
        assert "one rank in both runs" in named[name].why
        assert name not in {item.name for item in report.suspects}
    assert not any(item.metric == "completion_tokens" for item in report.moved)
    assert not any(name.startswith("topic.") for name in named)


def test_the_topic_in_the_committed_records() -> None:
    check_topic(compare(Results.load(RECORDS / "before.json"), Results.load(RECORDS / "topic.json")))


def test_the_variable_in_the_committed_records() -> None:
    check_variable(compare(Results.load(RECORDS / "before.json"), Results.load(RECORDS / "variable.json")))


def test_the_same_variable_is_a_suspect_between_ranks() -> None:
    """The same real records, told to be of eight ranks: the difference reaches every all-reduce."""
    before, after = Results.load(RECORDS / "before.json"), Results.load(RECORDS / "variable.json")
    for results in (before, after):
        for record in results.environments:
            record.server_arguments["tp_size"] = "8"
    report = compare(before, after)
    assert [item.name for item in report.suspects][:2] == [f"rank.{VARIABLE}", f"variable.{VARIABLE}"]


def test_a_run_against_itself_names_nothing() -> None:
    before = Results.load(RECORDS / "before.json")
    report = compare(before, before)
    assert report.compared == 5 and not report.moved and not report.differences


@pytest.mark.slow
@pytest.mark.server
def test_planted_anew(tmp_path: Path) -> None:
    """Three real servers, one after the other: the records of this tree."""

    def measure(name: str, *words: str, **variables: str) -> Results:
        out = tmp_path / f"{name}.json"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
        done = subprocess.run(
            [sys.executable, "-m", "sglang.bench_verify", *COMMAND, *words, "--out", str(out)],
            cwd=ROOT,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Results.load(out)

    before = measure("before")
    check_topic(compare(before, measure("topic", "--disable", TOPIC)))
    check_variable(compare(before, measure("variable", **{VARIABLE: "SYS"})))
