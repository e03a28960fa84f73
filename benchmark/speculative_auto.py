"""The switch between speculation and plain decode on the slice: what a token costs, and over plain decode.

Three engines stay on the GPU and are measured in turn: plain decode, and EAGLE-3 with acceptance simulated so low that
speculation loses (1.0) and so high that it wins (2.5), both with the switch on. Before that, untimed, every engine runs
every case once (there the switch finds its mode), and batches go above the largest captured size and back.

    python benchmark/speculative_auto.py --machine h200 --out benchmark/results/h200_speculative_auto.json

Where the GPU is shared with another bench, ``--quiet-from FILE`` ends the untimed part as soon as the file is there, and
``--start FILE`` begins the timed part only then.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.bench_verify.slice.engines import EngineError, EngineSpec, Fleet, SliceOptions
from sglang.bench_verify.slice.shapes import NAMED, rank_slice

CAPTURED = [1, 2]
ABOVE = 4
SWITCH_ON = {"SGLANG_SPEC_AUTO_ON_SIMULATED": "1"}
CASES = ((1024, 1, 400), (16384, 1, 300), (1024, 2, 200))
ARGUMENTS = {"cuda_graph_bs_decode": CAPTURED, "disable_prefill_cuda_graph": True}
SWITCHED = {**ARGUMENTS, "speculative_auto": "on"}


def specs() -> list[EngineSpec]:
    """The engines."""
    return [
        EngineSpec("decode", steps=0, arguments=ARGUMENTS),
        *(
            EngineSpec(f"auto-{accept}", accept_length=accept, arguments=SWITCHED, environment=SWITCH_ON)
            for accept in (1.0, 2.5)
        ),
    ]


def wanted(counters: Mapping[str, Any]) -> dict[str, Any]:
    """The counters that tell what the switch and the graphs did."""
    return {
        name: value
        for name, value in counters.items()
        if name.startswith(("spec_auto", "verify_graph", "graph_capture"))
    }


def warm(fleet: Fleet, quiet: Path | None) -> None:
    """Let every engine find its mode at every case, unless another bench wants the GPU."""
    for context, batch, tokens in CASES:
        for name in list(fleet.engines):
            if quiet is not None and quiet.exists():
                return
            try:
                fleet.measure(name, context, batch, tokens)
            except EngineError as error:
                print("warm-up failed", name, context, batch, error, flush=True)


def measure(
    fleet: Fleet, case: tuple[int, int, int], rounds: int, machine: str, deadline: float
) -> list[Row]:
    """One case on every engine, in turn; speculating engines carry their ratio over the plain one, if it runs."""
    context, batch, tokens = case
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    figures = fleet.in_turn(context, batch, tokens, rounds, deadline)
    known = [item["ms_per_token"] for item in figures.get("decode", [])]
    plain = statistics.median(known) if known else None
    rows = []
    for name, items in figures.items():
        if not items:
            continue
        spec = fleet.engines[name].spec
        state = fleet.engines[name].state()
        times = Metric.of([item["ms_per_token"] for item in items], "ms")
        metrics = {"token_ms": times}
        if spec.steps and plain is not None:
            metrics["over_plain_decode"] = Metric(times.value / plain, "ratio")
        rows.append(
            Row(
                bench="speculative_auto",
                machine=machine,
                variant="fork",
                case={
                    "model": fleet.shape.name,
                    "context": context,
                    "batch": batch,
                    "tokens": tokens,
                    "draft_tokens": spec.draft_tokens,
                    "accept_length": spec.accept_length if spec.steps else None,
                    "router": "dummy",
                    "engine": name,
                },
                metrics=metrics,
                counters=wanted(state.get("counters", {})),
                started=started,
            )
        )
        print(rows[-1].label(), {key: round(metric.value, 4) for key, metric in metrics.items()}, flush=True)
    return rows


def cross(fleet: Fleet, times: int, machine: str, quiet: Path | None) -> Row:
    """Pass the captured ceiling up and down: batches of 1 and of ABOVE in turn."""
    engine = fleet.engines["auto-2.5"]
    begin, crossings = time.monotonic(), 0
    while crossings < times and (quiet is None or not quiet.exists()):
        for batch in (ABOVE, 1):
            engine.measure(32, batch, 4)
            crossings += 1
    state = engine.state()
    return Row(
        bench="speculative_auto",
        machine=machine,
        variant="fork",
        case={"what": "crossing the captured ceiling", "captured": str(CAPTURED), "above": ABOVE},
        metrics={
            "crossings": Metric(float(crossings), "count"),
            "seconds": Metric(time.monotonic() - begin, "s"),
        },
        counters=wanted(state.get("counters", {})),
    )


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--out", default="")
    parser.add_argument("--folder", default="/tmp/speculative-auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--crossings", type=int, default=100)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of the timed part")
    parser.add_argument("--engines", default="", help="comma-separated names; all by default")
    parser.add_argument("--quiet-from", type=Path)
    parser.add_argument("--start", type=Path)
    args = parser.parse_args()
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    options = SliceOptions(max_batch=ABOVE, random_router=False, pool_tokens=66048)
    chosen = [spec for spec in specs() if not args.engines or spec.name in args.engines.split(",")]
    results = Results(environments=[capture()])
    with Fleet(shape, chosen, args.folder, options) as fleet:
        print(
            "started",
            {name: round(engine.startup_s, 1) for name, engine in fleet.engines.items()},
            flush=True,
        )
        for name, failure in fleet.failures.items():
            print(name, failure, flush=True)
        warm(fleet, args.quiet_from)
        if "auto-2.5" in fleet.engines:
            try:
                results.add(cross(fleet, args.crossings, args.machine, args.quiet_from))
                print(results.rows[-1].metrics, results.rows[-1].counters, flush=True)
            except EngineError as error:
                print("crossing failed", error, flush=True)
        while args.start is not None and not args.start.exists():
            time.sleep(0.05)
        deadline = time.monotonic() + args.limit
        with under_load(results.environments[0]):
            for case in CASES:
                if time.monotonic() > deadline - 3:
                    break
                try:
                    for row in measure(fleet, case, args.rounds, args.machine, deadline):
                        results.add(row)
                except EngineError as error:
                    print("failed", case, error, flush=True)
                if args.out:
                    results.save(args.out)
        if args.out:
            results.save(args.out)


if __name__ == "__main__":
    main()
