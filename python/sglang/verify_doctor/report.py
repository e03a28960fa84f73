"""The report for people: tables in colour where ``rich`` is installed and a terminal listens, else plain lines."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import IO, Any

from sglang.verify_doctor import tables
from sglang.verify_doctor.findings import Finding, Level, worst

_MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.FAULT: "FAULT"}
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.FAULT: "bold red"}
_MARK_WIDTH = 7
# Below this a text column would hold a word or two a line.
_TEXT_LEAST = 16


def summary(findings: list[Finding], mode: str) -> str:
    """The verdict in one line."""
    faults = sum(finding.level is Level.FAULT for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    tail = f", {_number(warnings, 'warning')}" if warnings else ""
    if mode == "running":
        return (f"the server has {_number(faults, 'fault')}" if faults else "the server runs") + tail
    if faults:
        return f"{mode} serving will fail: {_number(faults, 'fault')}, {_number(warnings, 'warning')}"
    return f"ready for {mode} serving{tail}"


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def plain(
    findings: list[Finding], mode: str, width: int | None = None, facts: Mapping[str, Any] | None = None
) -> str:
    """Lines without control characters, fit for a log; ``width`` breaks them for a terminal."""
    first = max((len(finding.about) for finding in findings), default=0)
    lines: list[str] = []
    group = ""
    for finding in findings:
        if finding.group != group:
            lines += ["", finding.group] if lines else [finding.group]
            group = finding.group
            lines += [f"  {line}" for line in tables.of(group, facts or {}, (width or 200) - 2)]
        lines += _lines(
            f"{_MARKS[finding.level]:<{_MARK_WIDTH}}  {finding.about:<{first}}  ", finding.found, width
        )
        if finding.cure:
            lines += _lines(f"{'':<{_MARK_WIDTH}}  {'':<{first}}  ", f"cure: {finding.cure}", width)
    return "\n".join([*lines, "", summary(findings, mode)])


def _lines(head: str, text: str, width: int | None) -> Iterator[str]:
    """``text`` behind ``head``, broken into lines that stay below each other."""
    if width is None:
        yield head + text
        return
    room = max(width - len(head), _TEXT_LEAST)
    for number, part in enumerate(textwrap.wrap(text, room) or [""]):
        yield (head if number == 0 else " " * len(head)) + part


def show(
    findings: list[Finding],
    mode: str,
    stream: IO[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Print the report, by default to the standard output of the moment."""
    stream = stream or sys.stdout
    if not stream.isatty():
        print(plain(findings, mode, facts=facts), file=stream)
        return
    width = shutil.get_terminal_size((100, 24)).columns
    if importlib.util.find_spec("rich") is None:
        print(plain(findings, mode, width, facts), file=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, width=width)
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    first = max((len(finding.about) for finding in findings), default=0)
    for group, members in groups.items():
        if group:
            console.print(Text(f"\n{group}", style="bold"))
        for line in tables.of(group, facts or {}, width - 2):
            console.print(Text(f"  {line}", no_wrap=True, overflow="ellipsis"))
        table = Table(show_lines=False, show_header=False, pad_edge=False, box=None)
        table.add_column("", no_wrap=True, width=_MARK_WIDTH)
        table.add_column("about", width=min(first, width // 3), overflow="fold")
        table.add_column("found", overflow="fold", ratio=1)
        for finding in members:
            found = Text(finding.found)
            if finding.cure:
                found.append(f"\ncure: {finding.cure}", style="bold")
            table.add_row(
                Text(_MARKS[finding.level], style=_STYLES[finding.level]), Text(finding.about), found
            )
        console.print(table)
    console.print(Text(f"\n{summary(findings, mode)}", style=_STYLES[worst(findings)]))
