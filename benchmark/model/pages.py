"""The table of predictions in the documentation, generated between markers like those of measured figures."""

from __future__ import annotations

import re

from benchmark.model.predict import ONE_GRAPH, UPSTREAM, kimi, predict

MACHINES = {"rtxpro6000x8": "8x RTX PRO 6000", "h200x8": "8x H200"}
CONTEXTS = {1024: "1k", 16384: "16k", 65536: "64k", 131072: "128k"}
ACCEPT_LENGTH = 2.0
BLOCK = re.compile(r"(<!-- prediction -->\n).*?(<!-- /prediction -->)", re.DOTALL)


def table() -> str:
    """Upstream and fork on both deployments, a row a context."""
    lines = [
        "| | context | upstream decode, ms | upstream cycle | fork decode | fork cycle | speculation on the fork |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for machine, name in MACHINES.items():
        for context, label in CONTEXTS.items():
            stock, ours = (predict(kimi(machine), path, context) for path in (UPSTREAM, ONE_GRAPH))
            speedup = ours.verdict(ACCEPT_LENGTH).speedup
            cells = (name, label, short(stock.decode_ms), short(stock.cycle_ms), short(ours.decode_ms))
            lines.append(f"| {' | '.join(cells)} | {short(ours.cycle_ms)} | {speedup:.2f}x |")
    return "\n".join(lines)


def short(ms: float) -> str:
    """Three digits."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"


def update(text: str) -> str:
    """Replace the table between the markers."""
    return BLOCK.sub(lambda match: match.group(1) + table() + "\n" + match.group(2), text)
