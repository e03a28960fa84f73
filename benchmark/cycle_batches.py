"""Cycles of the slice at batches from 1 to 32: a step time for every size, and no step above its neighbours.

EAGLE-3 with acceptance simulated at 2.0 on a slice of Kimi-K2, all requests of a batch at one context.
``over_neighbours`` is a step over the mean of the sizes beside it; the bar is 1.3. That requests which join and leave
change no text is ``test/gpu/test_cycle_graph.py``'s to show (``CYCLE_TEXT_BATCH=32``).

    python benchmark/cycle_batches.py --machine h200 --out benchmark/results/h200_cycle_batches.json

Sizes are measured in rounds, up and down in turn, and the median counts: one disturbed request is no step of the sizes.
The file is written after each round.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.progress import await_file
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.bench_verify.slice.engines import EngineError, EngineSpec, Fleet, SliceOptions
from sglang.bench_verify.slice.shapes import NAMED, rank_slice

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32)
CONTEXT, TOKENS = 4096, 64
# An answer of the engine: see ``slice.host.measure``.
Items = dict[int, list[dict[str, Any]]]


def over_neighbours(times: Sequence[float]) -> list[float | None]:
    """Each time over the mean of the two beside it; the ends over the one they have, None where there is none."""
    found: list[float | None] = []
    for i, value in enumerate(times):
        beside = [times[j] for j in (i - 1, i + 1) if 0 <= j < len(times)]
        found.append(value / (sum(beside) / len(beside)) if beside else None)
    return found


def measure_round(fleet: Fleet, name: str, batches: Sequence[int], deadline: float, items: Items) -> None:
    """Add one measurement of each size to ``items``, as far as the time goes; a size that fails is left out."""
    for batch in batches:
        if time.monotonic() > deadline:
            break
        try:
            item = fleet.measure(name, CONTEXT, batch, TOKENS)
        except EngineError as error:
            fleet.failures[f"batch {batch}"] = str(error)
            continue
        items.setdefault(batch, []).append(item)
        print(name, batch, round(float(item["ms_per_cycle"]), 4), flush=True)


def rows_of(items: Items, common: Row) -> list[Row]:
    """A row of each size, like ``common`` but for the size and its figures."""
    sizes = sorted(items)
    times = {batch: [float(item["ms_per_cycle"]) for item in items[batch]] for batch in sizes}
    ratios = over_neighbours([statistics.median(times[batch]) for batch in sizes])
    rows = []
    for batch, ratio in zip(sizes, ratios, strict=True):
        metrics = {"cycle_ms": Metric.of(times[batch], "ms")}
        if ratio is not None:
            metrics["over_neighbours"] = Metric(ratio, "ratio")
        # Of the round that the median is of: rounds may differ by more than phases do.
        middle = sorted(items[batch], key=lambda item: float(item["ms_per_cycle"]))[len(items[batch]) // 2]
        phases = dict(middle.get("phases") or {})
        rows.append(
            dataclasses.replace(
                common, case={**common.case, "batch": batch}, metrics=metrics, phases_ms=phases
            )
        )
    return rows


def graph_counters(state: Mapping[str, Any]) -> dict[str, Any]:
    """The counters that tell which graphs ran."""
    counters = state.get("counters", {})
    return {n: value for n, value in counters.items() if n.startswith(("cycle_graph", "verify_graph"))}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--out", default="")
    parser.add_argument("--folder", default="/tmp/cycle-batches")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of the measurements")
    parser.add_argument(
        "--start-when", default="", metavar="FILE", help="measure once this file exists (other work is done)"
    )
    parser.add_argument(
        "--topics-off", default="", help="comma-separated; cycle-graph gives the three graphs"
    )
    return parser.parse_args()


def main() -> None:
    """Measure and write the rows."""
    args = arguments()
    batches = sorted({int(word) for word in args.batches.split(",")})
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    options = SliceOptions(
        max_batch=batches[-1], random_router=False, pool_tokens=batches[-1] * (CONTEXT + TOKENS + 64) + 4096
    )
    spec = EngineSpec("cycles", accept_length=2.0, topics_off=tuple(filter(None, args.topics_off.split(","))))
    environment = capture()
    items: Items = {}
    with Fleet(shape, [spec], args.folder, options) as fleet:
        if not fleet.engines:
            raise SystemExit(f"the engine did not start: {fleet.failures}")
        engine = fleet.engines["cycles"]
        print(f"started in {engine.startup_s:.0f} s", flush=True)
        await_file(args.start_when, args.limit)
        # What a first request compiles is no step time.
        fleet.measure("cycles", 512, 1, 16)
        common = Row(
            bench="cycle_batches",
            machine=args.machine,
            variant="fork",
            case={
                "model": shape.name, "context": CONTEXT, "tokens": TOKENS, "draft_tokens": 3,
                "accept_length": 2.0, "router": "dummy", "topics_off": args.topics_off,
            },
            metrics={},
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )  # fmt: skip
        deadline = time.monotonic() + args.limit
        with under_load(environment):
            for turn in range(args.rounds):
                order = batches if turn % 2 == 0 else batches[::-1]
                measure_round(fleet, "cycles", order, deadline, items)
                common = dataclasses.replace(common, counters=graph_counters(engine.state()))
                if args.out and items:
                    Results(environments=[environment], rows=rows_of(items, common)).save(args.out)
        for what, failure in fleet.failures.items():
            print("FAILED", what, failure[-1500:], flush=True)
    ratios = [row.metrics["over_neighbours"].value for row in rows_of(items, common) if len(items) > 1]
    print("worst over its neighbours", max(ratios, default=None), flush=True)
    if not items or fleet.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
