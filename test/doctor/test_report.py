"""The report for a log and for a terminal say the same."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from sglang.verify_doctor import report, tables
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning

FINDINGS = [
    ok("a", "fine"),
    note("b", "so"),
    warning("c", "slow [link]", "reseat"),
    fault("dd", "gone", "get one"),
]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain() -> None:
    lines = report.plain(FINDINGS, "gpu").splitlines()
    assert lines[0] == "ok       a   fine"
    assert lines[3] == "             cure: reseat"
    assert lines[4].startswith("FAULT    dd  gone")
    assert lines[-1] == "gpu serving will fail: 1 fault, 1 warning"
    assert report.plain([], "cpu").splitlines()[-1] == "ready for cpu serving"


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rich a table (brackets are text, not markup), without it the plain lines."""
    pytest.importorskip("rich")
    stream = Terminal()
    report.show(FINDINGS, "gpu", stream)
    text = stream.getvalue()
    assert all(part in text for part in ("FAULT", "slow [link]", "reseat", "gpu serving will fail"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    stream = Terminal()
    report.show(FINDINGS, "gpu", stream)
    assert stream.getvalue().rstrip("\n") == report.plain(FINDINGS, "gpu")


def test_summary_counts() -> None:
    many: list[Finding] = [fault("x", "y", "z")] * 2
    assert report.summary(many, "cpu") == "cpu serving will fail: 2 faults, 0 warnings"
    assert report.summary([warning("x", "y", "z")], "cpu") == "ready for cpu serving, 1 warning"


def test_groups_have_headings_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [replace(ok("device", "2x"), group="machine"), replace(ok("topology", "fine"), group="links")]
    gpu = {
        "name": "NVIDIA H200",
        "capability": "9.0",
        "memory_mib": 143771,
        "power_w": 76.5,
        "power_limit_w": 700,
    }
    facts = {"nvidia": {"gpus": [gpu, gpu], "paths": [["X", "NV18"], ["NV18", "X"]]}}
    text = report.plain(found, "gpu", facts=facts)
    assert "\nlinks\n" in text and text.startswith("machine\n")
    assert "0    H200" in text and "76/700" in text and "GPU1  NV18  X" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = [warning("topology", "peer writes cross processor sockets " * 6, "compare two settings " * 5)]
    gpu = {"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "capability": "12.0", "memory_mib": 97249}
    facts = {"nvidia": {"gpus": [gpu] * 8, "paths": [["PXB"] * 8] * 8}}
    found = [replace(long[0], group=group) for group in ("machine", "links")]
    lines = report.plain(found, "gpu", width, facts).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(report.plain(long, "gpu", width).split()).count("sockets") == 6


def test_columns_that_do_not_fit_are_named() -> None:
    rows = [["a", "b" * 20, "cccc"], ["1", "2", "3"]]
    assert tables.fitting(rows, 24) == ["a  " + "b" * 20, "1  2", "(too narrow for: cccc)"]
    assert tables.fitting([["only titles"]], 80) == []


@pytest.mark.parametrize("width", [50, 100])
def test_tables_in_colour_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_mib": 143771}
    found = [replace(warning("topology", "peer writes cross sockets " * 6, "compare two"), group="machine")]
    stream = Terminal()
    report.show(found, "gpu", stream, facts={"nvidia": {"gpus": [gpu] * 2}})
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert "cure: compare two" in stream.getvalue()
