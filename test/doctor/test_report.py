"""The report for a log and for a terminal say the same."""

from __future__ import annotations

import io

import pytest
from sglang.verify_doctor import report
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
