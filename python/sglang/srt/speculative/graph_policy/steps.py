"""Counts of steps by pass and reason: ``verify_graph_steps{kind, reason}``, and one warning for each reason.

The counters are exported as ``sglang:spec_verify_graph_steps_total``; ``reason="replayed"`` is the good case.
"""

from __future__ import annotations

from sglang.fork import counters, fallbacks
from sglang.srt.speculative.graph_policy.reasons import REPLAYED, Eager

COUNTER = "verify_graph_steps"


def replayed(kind: str) -> None:
    """A step replayed the graph of ``kind``."""
    counters.add(COUNTER, kind=kind, reason=REPLAYED)


def eager(kind: str, why: Eager) -> None:
    """A step ran ``kind`` without a graph; the first time for each reason is a warning."""
    counters.add(COUNTER, kind=kind, reason=why.reason)
    fallbacks.record(f"cuda graph of {kind}", why.reason, detail=why.detail)
