"""The bench on a processor: simulated peers and gloo through the same command, rows and table."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.bench_all_reduce import __main__ as command
from sglang.bench_all_reduce import launch, report
from sglang.bench_all_reduce.worker import Job, Result
from sglang.bench_verify.rows import Results
from sglang.srt.distributed.one_shot import table_file
from sglang.srt.distributed.one_shot.policy import FUSED, ONE_SHOT, PLAIN, STOCK
from sglang.srt.distributed.one_shot.topology import Topology

PCIE = Topology(
    names=("RTX", "RTX"),
    buses=("0000:11:00.0", "0000:12:00.0"),
    paths=(("X", "PIX"), ("PIX", "X")),
    driver="580",
)


def job(rows: tuple[int, ...] = (1, 3)) -> Job:
    return Job((0, 1), "cuda", rows, 7168, torch.bfloat16, 2, 1, "", Path(), PCIE)


def result(**us: float) -> Result:
    """Figures by ``method_kind_rows``; the other cases are missing."""
    made = Result(gpu="RTX")
    for method, kind in (
        (ONE_SHOT, PLAIN),
        (ONE_SHOT, FUSED),
        ("nccl", PLAIN),
        ("nccl", FUSED),
        ("custom", PLAIN),
    ):
        made.variants[method, kind] = "fork" if method == ONE_SHOT else "upstream"
        for rows in (1, 3):
            key = f"{method.replace('-', '_')}_{kind}_{rows}"
            if key in us:
                made.figures[method, kind, rows] = [us[key], us[key]]
            else:
                made.missing[method, kind, rows] = "not here"
    return made


def test_stock_in_the_table_is_what_upstream_would_use() -> None:
    found = result(one_shot_plain_1=9.0, nccl_plain_1=24.0, custom_plain_1=7.0)
    assert report.table_of(job(), found, "t").choose(PLAIN, 14_336).method == STOCK
    found = result(one_shot_plain_1=9.0, nccl_plain_1=24.0)
    table = report.table_of(job(), found, "t")
    assert table.choose(PLAIN, 14_336).method == ONE_SHOT
    assert table.choose(FUSED, 14_336).method == STOCK
    assert (table.key.link, table.key.ranks, table.key.driver) == ("PIX", 2, "580")


def test_without_anything_of_upstreams_there_is_no_table() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        report.table_of(job(), result(one_shot_plain_1=9.0), "t")


def test_rows_keep_what_is_missing() -> None:
    rows = report.rows_of(job(), result(one_shot_plain_1=9.0), "m", "now")
    assert len(rows) == 10
    measured = [row for row in rows if row.metrics]
    assert [(row.variant, row.case["method"], row.metrics["us"].value) for row in measured] == [
        ("fork", ONE_SHOT, 9.0)
    ]
    assert all(row.note == "not here" for row in rows if not row.metrics)


def test_the_text_shows_a_dash_and_the_reason() -> None:
    text = report.text(job(), result(one_shot_plain_1=9.0, nccl_plain_1=24.0))
    assert "9.0" in text and "24.0" in text and " -" in text
    assert "missing:" in text and "not here" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "cuda", "--ranks", "9"], "0 are visible"),
        (["--device", "cpu", "--ranks", "1"], "1 ranks"),
        (["--device", "cpu", "--ranks", "9"], "9 ranks"),
        (["--device", "cpu", "--write"], "no table for a server"),
        (["--device", "cuda", "--devices", "0,0"], "GPU 0 is not visible"),
    ],
)
def test_bad_input_is_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("written for a machine without a GPU")
    assert command.main(words) == 2
    assert expected in capsys.readouterr().err


def test_rows_must_be_numbers() -> None:
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--rows", "1,x"])


def partly(rank: int, job: Job, tell: Any) -> Result:
    """Rank 0 measures one message and then stands still; rank 1 is done."""
    done = result(one_shot_plain_1=9.0)
    if rank == 0:
        tell("the second message", done)
        time.sleep(60)
    return done


def test_what_was_measured_before_a_hang_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(launch, "_SPAWN", fork)
    monkeypatch.setattr(launch, "work", partly)
    monkeypatch.setattr(command.topology, "gather", Topology)
    rows = tmp_path / "rows.json"
    words = [
        "--device",
        "cpu",
        "--rows",
        "1,3",
        "--limit-s",
        "8",
        "--json",
        str(rows),
        "--table",
        str(tmp_path / "t"),
    ]
    assert command.main(words) == 1
    said = capsys.readouterr()
    assert (
        "rank 0 not done after 8 s" in said.err and "measured before that" in said.out and "9.0" in said.out
    )
    assert [row.metrics["us"].value for row in Results.load(rows).rows if row.metrics] == [9.0]
    assert not (tmp_path / "t").exists()  # half a run is no table


SMALL = ["--device", "cpu", "--rows", "1,3", "--hidden", "256", "--repeats", "2", "--steps", "2", "--quiet"]


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang.bench_all_reduce", *SMALL, *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )


def test_a_whole_run_writes_rows_and_a_table(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", str(tmp_path / "rows.json"), "--table", str(tmp_path / "table.json"))
    assert done.returncode == 0, done.stderr
    assert "preflight  passed" in done.stdout
    results = Results.load(tmp_path / "rows.json")
    assert {row.case["method"] for row in results.rows} == {"one-shot", "packets", "two-stage", "gloo"}
    # Two passes of two repeats.
    assert all(row.metrics["us"].value > 0 and len(row.metrics["us"].samples) == 4 for row in results.rows)
    assert all("us_pass_2" in row.metrics and "us_between" not in row.metrics for row in results.rows)
    table = table_file.load(tmp_path / "table.json")
    assert (table.key.link, table.key.ranks, len(table.points)) == ("cpu", 2, 4)


def test_a_run_of_some_methods_has_no_table(tmp_path: Path) -> None:
    words = ("--methods", "packets,one-shot", "--json", str(tmp_path / "rows.json"))
    done = run(tmp_path, *words, "--table", str(tmp_path / "table.json"))
    assert done.returncode == 1 and "no table" in done.stderr
    rows = Results.load(tmp_path / "rows.json").rows
    assert {row.case["method"] for row in rows} == {"one-shot", "packets"}
    done = run(tmp_path, "--shapes", "3")
    assert done.returncode == 2 and "1, 2, 4 or 8 CTAs a row" in done.stderr
