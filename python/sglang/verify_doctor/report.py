"""The report for people: a table in colour where ``rich`` is installed and a terminal listens, else plain lines."""

from __future__ import annotations

import importlib.util
import sys
from typing import IO

from sglang.verify_doctor.findings import Finding, Level, worst

_MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.FAULT: "FAULT"}
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.FAULT: "bold red"}


def summary(findings: list[Finding], mode: str) -> str:
    """The verdict in one line."""
    faults = sum(finding.level is Level.FAULT for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if faults:
        return f"{mode} serving will fail: {_number(faults, 'fault')}, {_number(warnings, 'warning')}"
    return f"ready for {mode} serving" + (f", {_number(warnings, 'warning')}" if warnings else "")


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def plain(findings: list[Finding], mode: str) -> str:
    """Lines without control characters, fit for a log."""
    width = max((len(finding.about) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]:<7}  {finding.about:<{width}}  {finding.found}")
        if finding.cure:
            lines.append(f"{'':<7}  {'':<{width}}  cure: {finding.cure}")
    return "\n".join([*lines, "", summary(findings, mode)])


def show(findings: list[Finding], mode: str, stream: IO[str] = sys.stdout) -> None:
    """Print the report."""
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        print(plain(findings, mode), file=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False, box=None)
    for title in ("", "about", "found", "cure"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = Text(_MARKS[finding.level], style=_STYLES[finding.level])
        table.add_row(mark, Text(finding.about), Text(finding.found), Text(finding.cure))
    console = Console(file=stream)
    console.print(table)
    console.print(Text(f"\n{summary(findings, mode)}", style=_STYLES[worst(findings)]))
