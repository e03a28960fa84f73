"""The switch between speculation and plain decode on the slice: what a token costs, and over plain decode.

Three engines stay on the GPU and are measured in turn: plain decode, and EAGLE-3 with acceptance simulated so low that
speculation loses (1.0) and so high that it wins (2.5), both with the switch on. Before that, untimed, every engine runs
every case once (there the switch finds its mode), and batches go above the largest captured size and back.

    python benchmark/speculative_auto.py --machine h200 --out benchmark/results/h200_speculative_auto.json

Each row tells a token's time apart. ``token_ms`` is what a client sees. ``plain_step_ms`` is the median of plain steps in
steady state, ``plain_steps_mean_ms`` the mean of all plain steps with those that wrote rows for the draft, and
``cycle_step_ms`` the median of cycles, as the switch itself saw the last steps of each timed request;
``lead_ms`` is what the request's start and its first tokens take, which ``token_ms`` leaves out, and ``first_step_worst_ms``
the longest step behind a prefill. ``plain_device_ms`` and ``plain_gap_ms`` are the device's time in a decode and between two, from events. Counters are what
was added while the timed tokens ran: steps by mode, switches, probes, rows written for the draft.

``--profile-out FILE`` profiles plain decode and the switch at acceptance 1.0 at 16k, as ``slice_ab.py`` does.
Where the GPU is shared with another bench, ``--quiet-from FILE`` ends the untimed part as soon as the file is there, and
``--start FILE`` begins the timed part only then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.bench_verify.slice.derived import profile_row
from sglang.bench_verify.slice.engines import EngineError, EngineSpec, Fleet, SliceOptions
from sglang.bench_verify.slice.profiled import profiles
from sglang.bench_verify.slice.shapes import NAMED, rank_slice

CAPTURED = [1, 2]
ABOVE = 4
SWITCH_ON = {"SGLANG_SPEC_AUTO_ON_SIMULATED": "1"}
# Long enough that what a request's start costs more or less by chance (some ten milliseconds) is under a hundredth.
CASES = ((1024, 1, 1000), (16384, 1, 800), (1024, 2, 600))
WARM_TOKENS = 400
ARGUMENTS = {"cuda_graph_bs_decode": CAPTURED, "disable_prefill_cuda_graph": True}
SWITCHED = {**ARGUMENTS, "speculative_auto": "on"}
PROFILED, PROFILE_CONTEXT, PROFILE_TOKENS = ("decode", "auto-1.0"), 16384, 96
# Each reading of clocks and power starts a program on the host that the engines share.
LOAD_EVERY_S = 5.0
CROSSING_CONTEXT, CROSSING_TOKENS = 32, 4


def specs() -> list[EngineSpec]:
    """The engines."""
    return [
        EngineSpec("decode", steps=0, arguments=ARGUMENTS),
        *(
            EngineSpec(f"auto-{accept}", accept_length=accept, arguments=SWITCHED, environment=SWITCH_ON)
            for accept in (1.0, 2.5)
        ),
    ]


def counted(counters: Mapping[str, Any]) -> dict[str, float]:
    """The counters that tell what the switch and the graphs did."""
    return {name: value for name, value in counters.items() if name.startswith(("spec_auto", "verify_graph"))}


def captured(counters: Mapping[str, Any]) -> dict[str, Any]:
    """What capturing the graphs took; it is over before the first case."""
    return {name: value for name, value in counters.items() if name.startswith("graph_capture")}


def added(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """What the counters gained in these stretches together; those that gained nothing are left out."""
    found: dict[str, Any] = {}
    for before, after in pairs:
        then = counted(before.get("counters", {}))
        for name, value in counted(after.get("counters", {})).items():
            found[name] = found.get(name, 0) + value - then.get(name, 0)
    return {name: value for name, value in found.items() if value}


def device_means(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, float]:
    """Milliseconds of the device in a plain decode (``decode``) and between two (``host_gap``), over these stretches."""
    found = {}
    for phase in ("decode", "host_gap"):
        ms = count = 0.0
        for before, after in pairs:
            old = before.get("decode_totals", {}).get(phase, (0.0, 0))
            new = after.get("decode_totals", {}).get(phase, (0.0, 0))
            ms, count = ms + new[0] - old[0], count + new[1] - old[1]
        if count > 0:
            found[phase] = ms / count
    return found


def step_metrics(states: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Step times as the switch saw them at the end of each timed request."""
    steady: dict[str, list[float]] = {"plain": [], "speculate": []}
    means, worst, first = [], [], []
    for state in states:
        groups = (state.get("speculative_auto") or {}).get("recent") or []
        for group in groups:
            if group["kind"] == "steady":
                steady[group["mode"]].append(group["median_ms"])
        plain = [
            group for group in groups if group["mode"] == "plain" and group["kind"] in ("steady", "caught up")
        ]
        if plain:
            steps = sum(group["steps"] for group in plain)
            means.append(sum(group["mean_ms"] * group["steps"] for group in plain) / steps)
            worst.append(max(group["worst_ms"] for group in plain))
        first += [group["worst_ms"] for group in groups if group["kind"] == "prefilled"]
    named = {
        "plain_step_ms": steady["plain"],
        "plain_steps_mean_ms": means,
        "plain_steps_worst_ms": worst,
        "first_step_worst_ms": first,
        "cycle_step_ms": steady["speculate"],
    }
    return {name: Metric.of(values, "ms") for name, values in named.items() if values}


def warm(fleet: Fleet, quiet: Path | None) -> None:
    """Let every engine find its mode at every case, unless another bench wants the GPU."""
    for context, batch, tokens in CASES:
        for name in list(fleet.engines):
            if quiet is not None and quiet.exists():
                return
            try:
                fleet.measure(name, context, batch, min(tokens, WARM_TOKENS))
            except EngineError as error:
                print("warm-up failed", name, context, batch, error, flush=True)


def measure(
    fleet: Fleet, case: tuple[int, int, int], rounds: int, machine: str, deadline: float
) -> list[Row]:
    """One case on every engine, in turn; speculating engines carry their ratio over the plain one, if it runs."""
    context, batch, tokens = case
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    figures = fleet.in_turn(context, batch, tokens, rounds, deadline, watch=True)
    known = [item["ms_per_token"] for item in figures.get("decode", [])]
    plain = statistics.median(known) if known else None
    rows = []
    for name, items in figures.items():
        if not items:
            continue
        spec = fleet.engines[name].spec
        pairs = [(item["states"][0], item["states"][1]) for item in items]
        metrics = {
            "token_ms": Metric.of([item["ms_per_token"] for item in items], "ms"),
            "lead_ms": Metric.of([1e3 * item["lead_s"] for item in items], "ms"),
        }
        metrics |= step_metrics([after for _, after in pairs])
        device = device_means(pairs)
        for phase, metric in (("decode", "plain_device_ms"), ("host_gap", "plain_gap_ms")):
            if phase in device:
                metrics[metric] = Metric(device[phase], "ms")
        if spec.steps and plain is not None:
            metrics["over_plain_decode"] = Metric(metrics["token_ms"].value / plain, "ratio")
            if "plain_step_ms" in metrics:
                metrics["plain_step_over_plain_decode"] = Metric(
                    metrics["plain_step_ms"].value / plain, "ratio"
                )
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
                counters=added(pairs) | captured(pairs[-1][1].get("counters", {})),
                started=started,
            )
        )
        print(rows[-1].label(), {key: round(metric.value, 4) for key, metric in metrics.items()}, flush=True)
        print("   ", added(pairs), flush=True)
    return rows


def cross(fleet: Fleet, times: int, machine: str, quiet: Path | None) -> Row:
    """Pass the captured ceiling up and down so often: batches of ABOVE and of 1 in turn, untimed.

    Raises:
        EngineError: a batch did not get its tokens.
    """
    engine = fleet.engines["auto-2.5"]
    before = engine.state()
    # The first batch above comes from below as well.
    engine.generate(CROSSING_CONTEXT, 1, CROSSING_TOKENS)
    begin, done = time.monotonic(), 0
    while done < times and (quiet is None or not quiet.exists()):
        for batch in (ABOVE, 1):
            got = engine.generate(CROSSING_CONTEXT, batch, CROSSING_TOKENS)
            if len(got) != batch or min(got) < CROSSING_TOKENS:
                raise EngineError(f"crossing {done}: a batch of {batch} got {got} tokens")
        done += 1
    seconds = time.monotonic() - begin
    return Row(
        bench="speculative_auto",
        machine=machine,
        variant="fork",
        case={"what": "crossing the captured ceiling", "captured": str(CAPTURED), "above": ABOVE},
        metrics={"up_and_down": Metric(float(done), "count"), "seconds": Metric(seconds, "s")},
        counters=added([(before, engine.state())]),
    )


def profile(fleet: Fleet, machine: str, folder: Path, out: Path) -> list[Row]:
    """Profiles of plain decode and of the switch while it decodes plainly; ``out`` gets them whole."""
    names = [name for name in PROFILED if name in fleet.engines]
    found = profiles(fleet, names, PROFILE_CONTEXT, PROFILE_TOKENS, folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return [profile_row(entry, fleet.engines[entry["engine"]].spec, fleet.shape, machine) for entry in found]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--out", default="")
    parser.add_argument("--profile-out", type=Path, help="profile at 16k, and write the profiles here")
    parser.add_argument("--folder", default="/tmp/speculative-auto")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--crossings", type=int, default=100, help="times up and down")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of the timed part")
    parser.add_argument("--engines", default="", help="comma-separated names; all by default")
    parser.add_argument("--quiet-from", type=Path)
    parser.add_argument("--start", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and write the rows."""
    args = arguments()
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    options = SliceOptions(max_batch=ABOVE, random_router=False, pool_tokens=66048)
    chosen = [spec for spec in specs() if not args.engines or spec.name in args.engines.split(",")]
    results = Results(environments=[capture()])

    def keep(rows: Sequence[Row]) -> None:
        for row in rows:
            results.add(row)
        if args.out:
            results.save(args.out)

    with Fleet(shape, chosen, args.folder, options) as fleet:
        print(
            "started",
            {name: round(engine.startup_s, 1) for name, engine in fleet.engines.items()},
            flush=True,
        )
        started = dict(fleet.failures)
        for name, failure in started.items():
            print(name, failure, flush=True)
        warm(fleet, args.quiet_from)
        if "auto-2.5" in fleet.engines:
            try:
                keep([cross(fleet, args.crossings, args.machine, args.quiet_from)])
                print(results.rows[-1].metrics, results.rows[-1].counters, flush=True)
            except EngineError as error:
                print("crossing failed", error, flush=True)
        while args.start is not None and not args.start.exists():
            time.sleep(0.05)
        deadline = time.monotonic() + args.limit
        with under_load(results.environments[0], LOAD_EVERY_S):
            for case in CASES:
                if time.monotonic() > deadline - 3:
                    break
                keep(measure(fleet, case, args.rounds, args.machine, deadline))
        if args.profile_out is not None:
            keep(profile(fleet, args.machine, Path(args.folder) / "traces", args.profile_out))
        for name, failure in fleet.failures.items():
            if name not in started:
                print(name, failure, flush=True)
        keep([])


if __name__ == "__main__":
    main()
