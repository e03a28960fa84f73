"""README tables made from ``headline.json``, in place, between markers.

A marked block looks like this and is replaced as a whole::

    <!-- table: slice -->
    ... generated ...
    <!-- /table -->

``--check`` compares instead of writing, so a README that quotes an old figure fails the lint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang.bench_verify.errors import BenchError
from sglang.bench_verify.verdict import DEFAULT_RATES
from sglang.srt.speculative.stats.breakeven import best_drafted

Headline = Mapping[str, Mapping[str, Any]]
BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9-]+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)
CONTEXTS = ("1k", "16k", "64k", "128k")
EMPTY = "*not measured yet*"


class TableError(BenchError):
    """A marker that names no table."""


def update(text: str, headline: Headline) -> str:
    """Replace the body of every marked block. Raises TableError for an unknown table name."""

    def replace(match: re.Match[str]) -> str:
        name = match.group("name")
        if name not in TABLES:
            raise TableError(f"table {name!r} is unknown; known are {', '.join(sorted(TABLES))}")
        return match.group(1) + TABLES[name](headline) + "\n" + match.group(4)

    return BLOCK.sub(replace, text)


def update_file(path: str | Path, headline: Headline, check: bool = False) -> bool:
    """Update one file; returns whether it was already right. With ``check`` nothing is written."""
    target = Path(path)
    before = target.read_text(encoding="utf-8")
    after = update(before, headline)
    if before != after and not check:
        target.write_text(after, encoding="utf-8")
    return before == after


def slice_table(headline: Headline, series: str = "slice") -> str:
    """Upstream against fork on the one-GPU slice, a row a context."""
    rows = []
    for machine in _machines(headline, f".{series}."):
        for context in _contexts(headline, f"{machine}.{series}."):
            decode = headline.get(f"{machine}.{series}.decode_ms.{context}")
            cycle = headline.get(f"{machine}.{series}.cycle_ms.{context}")
            over = headline.get(f"{machine}.{series}.cycle_over_decode.{context}")
            rows.append(
                [machine, context, _cell(decode, "upstream"), _cell(decode, "value"), _cell(cycle, "upstream"),
                 _cell(cycle, "value"), _cell(over, "upstream"), _cell(over, "value"), _times(cycle)]
            )  # fmt: skip
    return _table(
        ["machine", "context", "decode ms: upstream", "fork", "cycle ms: upstream", "fork", "cycle / decode: upstream",
         "fork", "cycle faster by"],
        rows,
    )  # fmt: skip


def attention_table(headline: Headline) -> str:
    """The MLA verify kernel by context."""
    rows = []
    for machine in _machines(headline, ".mla_verify_us."):
        for context in _contexts(headline, f"{machine}.mla_verify_us."):
            verify = headline.get(f"{machine}.mla_verify_us.{context}")
            ratio = headline.get(f"{machine}.mla_verify3_over_decode1.{context}")
            rows.append(
                [machine, context, _cell(verify, "upstream"), _cell(verify, "value"), _times(verify),
                 _cell(ratio, "upstream"), _cell(ratio, "value")]
            )  # fmt: skip
    return _table(
        [
            "machine",
            "context",
            "verify of 3, us a layer: upstream",
            "fork",
            "faster by",
            "3 tokens / 1 token: upstream",
            "fork",
        ],
        rows,
    )


def headline_table(headline: Headline) -> str:
    """Every figure with its source row."""
    rows = [
        [
            f"`{name}`",
            f"{entry['value']:g} {entry['unit']}",
            _cell(entry, "upstream"),
            _times(entry),
            f"`{entry['row']}`",
        ]
        for name, entry in headline.items()
    ]
    return _table(["figure", "fork", "upstream", "faster by", "raw row"], rows)


def demo_table(headline: Headline) -> str:
    """The demonstration on a CPU."""
    names = {"accept_length": "accept length", "startup_s": "start-up, s", "tok_s": "tokens a second"}
    rows = [
        [label, _cell(headline.get(f"cpu.demo.{key}"), "value")]
        for key, label in names.items()
        if f"cpu.demo.{key}" in headline
    ]
    return _table(["figure (CPU, shipped model)", "value"], rows)


def draft_length_table(headline: Headline) -> str:
    """Cycle over decode by draft length, a row a context and batch; the best length at the rates of the verdict."""
    rows = []
    part = ".draft_length.decode_ms."
    for name in sorted((name for name in headline if part in name), key=_by_number):
        machine, _, place = name.partition(part)
        context, _, batch = place.rpartition(".b")
        decode = float(headline[name]["value"])
        cycles = {
            width - 1: float(headline[found]["value"])
            for width in range(2, 6)
            if (found := f"{machine}.draft_length.cycle_ms.{place}.d{width}") in headline
        }
        best, speedups = best_drafted(cycles, decode, DEFAULT_RATES)
        cells = [f"{cycles[n]:g} ({cycles[n] / decode:.2f}x)" if n in cycles else "-" for n in range(1, 5)]
        rows.append([machine, context, batch, f"{decode:g}", *cells, f"{best} ({speedups[best]:.2f}x)"])
    return _table(
        ["machine", "context", "batch", "decode ms", "1 draft: cycle ms (over decode)", "2", "3", "4", "best (faster by)"],
        rows,
    )  # fmt: skip


def accept_length_table(headline: Headline) -> str:
    """Accept length by draft length, of real answers of the shipped model."""
    part = ".bench_demo.accept_length.d"
    names = sorted((name for name in headline if part in name), key=_by_number)
    rows = [[str(int(name.rpartition("d")[2]) - 1), _cell(headline[name], "value")] for name in names]
    return _table(["draft tokens", "accept length"], rows)


def auto_table(headline: Headline) -> str:
    """What a token costs with the switch on, where speculation loses and where it wins, beside plain decode."""
    rows = []
    part = ".auto.token_ms."
    places = {name.partition(".decode")[0] for name in headline if part in name and name.endswith(".decode")}
    for name in sorted(places, key=_by_number):
        machine, _, place = name.partition(part)
        context, _, batch = place.rpartition(".b")
        cells = []
        for engine in ("auto-1.0", "auto-2.5"):
            token = headline.get(f"{name}.{engine}")
            over = headline.get(f"{machine}.auto.over_plain_decode.{place}.{engine}")
            cells.append(f"{_cell(token, 'value')} ({_cell(over, 'value')}x)" if token else "-")
        rows.append([machine, context, batch, _cell(headline.get(f"{name}.decode"), "value"), *cells])
    return _table(
        ["machine", "context", "batch", "plain decode, ms a token", "switch, 1.0 kept (over plain decode)", "switch, 2.5 kept"],
        rows,
    )  # fmt: skip


def nonfinite_table(headline: Headline) -> str:
    """What the look for NaN costs a step."""
    rows = []
    part = ".nonfinite.device_us."
    for name in sorted((name for name in headline if part in name), key=_by_number):
        machine, _, place = name.partition(part)
        work, _, batch = place.rpartition(".b")
        host = headline.get(f"{machine}.nonfinite.host_us.{place}")
        rows.append([machine, work, batch, _cell(headline[name], "value"), _cell(host, "value")])
    return _table(["machine", "work", "batch", "device, us", "host, us"], rows)


TABLES: dict[str, Callable[[Headline], str]] = {
    "slice": slice_table,
    "slice-random-router": lambda headline: slice_table(headline, "slice_random_router"),
    "attention": attention_table,
    "headline": headline_table,
    "demo": demo_table,
    "draft-lengths": draft_length_table,
    "accept-lengths": accept_length_table,
    "nonfinite": nonfinite_table,
    "speculative-auto": auto_table,
}


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key by which 1k stands before 16k, and batch 8 before 32."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _machines(headline: Headline, part: str) -> list[str]:
    return sorted({name.split(".")[0] for name in headline if part in name})


def _contexts(headline: Headline, prefix: str) -> list[str]:
    present = {name.rsplit(".", 1)[1] for name in headline if name.startswith(prefix)}
    return [context for context in CONTEXTS if context in present]


def _cell(entry: Mapping[str, Any] | None, key: str) -> str:
    value = entry.get(key) if entry else None
    return "-" if value is None else f"{value:g}"


def _times(entry: Mapping[str, Any] | None) -> str:
    ratio = entry.get("ratio") if entry else None
    return "-" if ratio is None else f"{ratio:.3g}x"


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return EMPTY
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines.extend("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(lines)
