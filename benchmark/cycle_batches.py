"""Cycles of the slice at batches from 1 to 32: a step time for every size, and no step above its neighbours.

EAGLE-3 with acceptance simulated at 2.0 on a slice of Kimi-K2, all requests of a batch at one context.
``over_neighbours`` is a step over the mean of the sizes beside it; the bar is 1.3. That requests which join and leave
change no text is ``test/gpu/test_cycle_graph.py``'s to show (``CYCLE_TEXT_BATCH=32``).

    python benchmark/cycle_batches.py --machine h200 --out benchmark/results/h200_cycle_batches.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.bench_verify.slice.engines import EngineError, EngineSpec, Fleet, SliceOptions
from sglang.bench_verify.slice.shapes import NAMED, rank_slice

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32)
CONTEXT, TOKENS = 4096, 64


def over_neighbours(times: Sequence[float]) -> list[float | None]:
    """Each time over the mean of the two beside it; the ends over the one they have, None where there is none."""
    found: list[float | None] = []
    for i, value in enumerate(times):
        beside = [times[j] for j in (i - 1, i + 1) if 0 <= j < len(times)]
        found.append(value / (sum(beside) / len(beside)) if beside else None)
    return found


def measured(
    fleet: Fleet, name: str, batches: Sequence[int], deadline: float
) -> list[tuple[int, float, Any]]:
    """(batch, ms a cycle, phases) of each size, as far as the time goes."""
    found = []
    for batch in batches:
        if time.monotonic() > deadline:
            break
        item = fleet.measure(name, CONTEXT, batch, TOKENS)
        found.append((batch, float(item["ms_per_cycle"]), item.get("phases") or {}))
        print(name, batch, round(found[-1][1], 4), flush=True)
    return found


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--out", default="")
    parser.add_argument("--folder", default="/tmp/cycle-batches")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of the measurements")
    parser.add_argument(
        "--topics-off", default="", help="comma-separated; cycle-graph gives the three graphs"
    )
    args = parser.parse_args()
    batches = sorted({int(word) for word in args.batches.split(",")})
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    options = SliceOptions(
        max_batch=batches[-1], random_router=False, pool_tokens=batches[-1] * (CONTEXT + TOKENS + 64) + 4096
    )
    spec = EngineSpec("cycles", accept_length=2.0, topics_off=tuple(filter(None, args.topics_off.split(","))))
    results = Results(environments=[capture()])
    with Fleet(shape, [spec], args.folder, options) as fleet:
        if not fleet.engines:
            raise SystemExit(f"the engine did not start: {fleet.failures}")
        # What a first request compiles is no step time.
        fleet.measure("cycles", 512, 1, 16)
        deadline = time.monotonic() + args.limit
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with under_load(results.environments[0]):
            try:
                items = measured(fleet, "cycles", batches, deadline)
            except EngineError as error:
                raise SystemExit(f"measuring failed: {error}") from error
        counters = fleet.engines["cycles"].state().get("counters", {})
        kept = {
            name: value
            for name, value in counters.items()
            if name.startswith(("cycle_graph", "verify_graph"))
        }
        ratios = over_neighbours([ms for _, ms, _ in items])
        for (batch, ms, phases), ratio in zip(items, ratios, strict=True):
            metrics = {"cycle_ms": Metric(ms, "ms")}
            if ratio is not None:
                metrics["over_neighbours"] = Metric(ratio, "ratio")
            results.add(
                Row(
                    bench="cycle_batches",
                    machine=args.machine,
                    variant="fork",
                    case={
                        "model": shape.name, "context": CONTEXT, "batch": batch, "tokens": TOKENS, "draft_tokens": 3,
                        "accept_length": 2.0, "router": "dummy", "topics_off": args.topics_off,
                    },
                    metrics=metrics,
                    phases_ms=dict(phases),
                    counters=kept,
                    started=started,
                )
            )  # fmt: skip
        if args.out:
            results.save(args.out)
        worst = max((ratio for ratio in ratios if ratio is not None), default=None)
        print("worst over its neighbours", worst, flush=True)


if __name__ == "__main__":
    main()
