"""``python cycle_replays.py SHARED DRAWN COUNT LIMIT_S``: replays of a captured cycle against the eager program.

Prints one JSON object: how many replays ran in how many seconds. Needs ``test/engine/cycle_graph`` on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import replays
import torch
from sglang.srt.speculative.cycle_graph import kernels
from sglang.srt.speculative.cycle_graph.driver import KeptGraph
from sglang.srt.speculative.cycle_graph.graphs import ChildPasses, capture


def child(work: Any) -> Any:
    """A pass as a graph of its own, as upstream captures them."""
    work()
    torch.cuda.synchronize()
    graph = KeptGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def main() -> None:
    """Capture, compare, print."""
    shared, drawn = (bool(int(word)) for word in sys.argv[1:3])
    count, limit_s = int(sys.argv[3]), float(sys.argv[4])
    parts = kernels.parts(replays.VOCABULARY)
    whole, plain = replays.make_pair(shared, drawn, parts, parts, "cuda")
    replays.settle(whole)
    mine = replays.Toy(whole, 1)
    passes = ChildPasses((child(mine.draft), child(mine.verify), child(mine.extend)))
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    entry = capture(whole, passes, torch.cuda.graph_pool_handle(), stream)
    begun = time.monotonic()
    ran = replays.compare(whole, plain, entry.graph.replay, kernels, max(1, count), limit_s=limit_s)
    print(json.dumps({"replays": ran, "seconds": round(time.monotonic() - begun, 1)}), flush=True)


if __name__ == "__main__":
    main()
