"""The bench on a processor: simulated peers and gloo through the same command, rows and table."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.bench_all_reduce import __main__ as command
from sglang.bench_all_reduce import launch, measure, report, worker
from sglang.bench_all_reduce.worker import Job, Result, work
from sglang.bench_verify.rows import Results
from sglang.srt.distributed.one_shot import table_file
from sglang.srt.distributed.one_shot.errors import PeerTimeout
from sglang.srt.distributed.one_shot.policy import FUSED, ONE_SHOT, PLAIN, STOCK
from sglang.srt.distributed.one_shot.simulated import SimulatedKernels
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


def interrupted(rank: int, job: Job, tell: Any) -> Result:
    """Every rank stands still once something was measured; then the group gets an interrupt, as at a limit."""
    if rank == 0:
        tell("the second message", result(one_shot_plain_1=9.0))
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    return Result()


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_SPAWN", multiprocessing.get_context("fork"))
    monkeypatch.setattr(launch, "work", interrupted)
    monkeypatch.setattr(command.topology, "gather", Topology)
    rows = tmp_path / "rows.json"
    assert command.main(["--device", "cpu", "--rows", "1,3", "--json", str(rows)]) == 1
    said = capsys.readouterr()
    assert "interrupted" in said.err and "9.0" in said.out
    assert [row.metrics["us"].value for row in Results.load(rows).rows if row.metrics] == [9.0]


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the end, so that nothing that ends this process loses them."""
    rows, kept = tmp_path / "rows.json", []

    def run(job: Job, limit_s: float, verbose: bool, keep: Any) -> Result:
        for us in (9.0, 8.0):
            keep(result(one_shot_plain_1=us))
            kept.append([row.metrics["us"].value for row in Results.load(rows).rows if row.metrics])
        raise SystemExit(9)

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--json", str(rows)])
    assert kept == [[9.0], [8.0]]


def standing(rank: int, job: Job, tell: Any) -> Result:
    """On rank 1 packets of 3 rows never end; the ranks find out as a device does."""
    samples, calls = measure.samples, [0]

    def stands_still(method: Any, x: torch.Tensor, *rest: Any) -> measure.Figures:
        if method.name == "packets" and method.kind == PLAIN and x.shape[0] == 3:
            calls[0] += 1
            measure._together(rest[1], rank != 1)
        return samples(method, x, *rest)

    measure.samples = stands_still
    measure.settled = lambda limit_s=0.0: True
    made = work(rank, job, tell)
    assert calls == [1]  # not tried again in the second pass
    return made


def simulated_bench(
    ranks: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[tuple[Any, Any, Any], Any], Path]:
    """The whole bench with ``ranks`` as its ranks' work: rows by method, kind and message rows, and where its table is."""
    monkeypatch.setattr(launch, "_SPAWN", multiprocessing.get_context("fork"))
    monkeypatch.setattr(launch, "work", ranks)
    monkeypatch.setattr(command.topology, "gather", Topology)
    rows, table = folder / "rows.json", folder / "table.json"
    words = ["--device", "cpu", "--hidden", "64", "--rows", "3,1", "--repeats", "1", "--steps", "2"]
    assert command.main([*words, "--json", str(rows), "--table", str(table)]) == 0
    return {
        (row.case["method"], row.case["kind"], row.case["rows"]): row for row in Results.load(rows).rows
    }, table


def test_what_stands_still_is_given_up_and_the_bench_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, table = simulated_bench(standing, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "packets sum: stood still (rank 0: another rank was not done; rank 1: not done in time)" in said
    assert not found["packets", PLAIN, 3].metrics and "stood still" in found["packets", PLAIN, 3].note
    # The next message goes through another workspace, and every method is measured.
    assert found["packets", PLAIN, 1].metrics["us"].value > 0 and found["gloo", FUSED, 1].metrics
    # A way that stood still is in no table, also where it did not.
    assert all(
        "packets" not in point.us and "one-shot" in point.us for point in table_file.load(table).points
    )


def drifting(rank: int, job: Job, tell: Any) -> Result:
    """In one workspace, rank 1 has made a call more on channel 1: of the first figure, which looks like any other."""
    SimulatedKernels.counters = lambda _, space: [7, 7 + int(rank == 1 and space == "target")]  # type: ignore[attr-defined]
    return work(rank, job, tell)


def test_a_figure_after_which_counters_differ_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, table = simulated_bench(drifting, tmp_path, monkeypatch)
    assert "counters differ in channels [1] (channel 1: [7, 8] by rank)" in capsys.readouterr().out
    assert not found["one-shot", PLAIN, 3].metrics and "counters differ" in found["one-shot", PLAIN, 3].note
    assert found["one-shot", PLAIN, 1].metrics["us"].value > 0  # in another workspace
    assert all(
        "one-shot" not in point.us and "packets" in point.us for point in table_file.load(table).points
    )


def test_a_figure_in_which_a_rank_gave_up_means_nothing() -> None:
    """Its later calls neither push nor wait, and are the fastest of all."""
    assert worker._unsound([("", [3, 4]), ("", [3, 4])]) == ""
    assert worker._unsound([("", [3]), ("ended", [3])]) == "a wait ended by itself (rank 1: ended)"
    assert worker._unsound([("", [3]), ("", [3, 4])]).startswith("counters differ in channels [1]")
    assert worker._after(None, "target") == ["", []]


def test_what_upstreams_leaves_on_a_device_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here can end its kernels."""

    class Alone:
        def require(self, label: str, value: Any, limit_s: float) -> list[Any]:
            return [value, [True, "another rank was not done", []]]

    monkeypatch.setattr(measure, "settled", lambda limit_s=0.0: False)
    exchange: Any = Alone()
    with pytest.raises(RuntimeError, match="did not end its work: rank 0: not done in time"):
        worker._give_up(None, "", exchange, ("nccl", PLAIN, 3), "not done in time")


def test_a_report_names_the_channels_whose_counters_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both:
        def require(self, label: str, value: Any, limit_s: float) -> list[Any]:
            return [value, [True, "well", [5, 8, 7]]]

    class Kernels:
        aborted: list[str] = []  # noqa: RUF012

        def abort(self, workspace: str) -> None:
            self.aborted.append(workspace)

        def check(self, workspace: str) -> None:
            raise PeerTimeout(0, 1, workspace, channel=1, epoch=9, seen=7, aborted=True)

        def counters(self, workspace: str) -> list[int]:
            return [5, 9, 7]

    monkeypatch.setattr(measure, "settled", lambda limit_s=0.0: True)
    kernels: Any = Kernels()
    exchange: Any = Both()
    words = worker._give_up(kernels, "target", exchange, ("packets", PLAIN, 3), "not done in time")
    assert kernels.aborted == ["target"]
    assert "channel 1, stage 0, epoch 9, seen 7" in words and "differ in channels [1]" in words


class Event:
    """Of a device that is done at the third look, or never."""

    looks = 0

    def record(self) -> None: ...

    def query(self) -> bool:
        Event.looks += 1
        return Event.looks % 3 == 0


def test_a_device_is_waited_for_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert measure.settled(60.0) and Event.looks == 3
    assert not measure.settled(-1.0)
    measure._together(lambda well: well, True)
    with pytest.raises(measure.StoodStill, match="not done in time"):
        measure._together(lambda well: well, False)
    with pytest.raises(measure.StoodStill, match="another rank"):
        measure._together(lambda well: False, True)


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
