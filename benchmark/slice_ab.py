"""Upstream against the fork on a one-rank slice of Kimi-K2, both resident on one GPU, measured in turn.

Four engines of the same composed tree start side by side: decode and EAGLE-3 (a chain of 3), each with the fork's
topics on and off. At every context they are measured forth and back with the others idle. Then EAGLE-3 cycles and
decode steps are profiled at one context. Rows and profiles go to ``--out``.

    python benchmark/slice_ab.py --out benchmark/results/slice_h200.json --profile-out build/profiles.json

Dummy weights route every token alike, so the router's logits are replaced by noise (``--no-random-router`` leaves
them). The simulated accept length is 2.0. An engine named ``fork-eagle3-no-verify-stats`` shows what the statistics
cost. With ``--tp 2`` the slice holds two ranks' shares and runs on two GPUs, so that reductions are real;
``SGLANG_FORK_ALL_REDUCE=force`` gives the fork's engines its own where no table was measured.

Engines that do not fit one GPU together (61 layers) run with ``--one-at-a-time``: each starts, is measured at every
context and ends before the next one starts; a row's note says so, since a clock that drifts then hits them apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.bench_verify.commands.slice import numbers
from sglang.bench_verify.environment import Environment, capture, under_load
from sglang.bench_verify.progress import await_file
from sglang.bench_verify.rows import Results, Row, Scalar
from sglang.bench_verify.slice import plan as plans
from sglang.bench_verify.slice.derived import profile_row, statistics_cost
from sglang.bench_verify.slice.engines import EngineError, EngineSpec, Fleet, SliceOptions, stock_topics
from sglang.bench_verify.slice.profiled import profiles
from sglang.bench_verify.slice.shapes import NAMED, rank_slice

# Upstream's EAGLE-3 needs 160 ms a cycle at 64k, and twice that at 128k: few tokens there, and none beyond.
SLOW_CONTEXT, SLOW_TOKENS = 32768, 16
# A first request compiles and allocates what no later one does; it is run and thrown away.
WARM_CONTEXT, WARM_TOKENS = 512, 32
APART = "engines one at a time"


@dataclass(frozen=True)
class Case:
    """One context: how many tokens each engine generates; engines left out are not measured."""

    context: int
    tokens: dict[str, int]


def specifications(names: Sequence[str], accept_length: float) -> list[EngineSpec]:
    """Engines by name: ``{upstream,fork}-{decode,eagle3}``, with ``-no-TOPIC`` for a fork with one topic off.

    ``-with-NAME=VALUE`` behind that sets a variable of the engine's environment.
    """
    stock = stock_topics()
    found = []
    for name in names:
        whole, _, variable = name.partition("-with-")
        base, _, off = whole.partition("-no-")
        variant, _, kind = base.partition("-")
        if variant not in ("upstream", "fork") or kind not in ("decode", "eagle3"):
            raise SystemExit(
                f"engine {name!r}: use upstream-decode, upstream-eagle3, fork-decode, fork-eagle3"
            )
        topics = stock if variant == "upstream" else tuple(part for part in off.split("+") if part)
        steps = 2 if kind == "eagle3" else 0
        key, _, value = variable.partition("=")
        if variable and not (key and value):
            raise SystemExit(f"engine {name!r}: -with- needs NAME=VALUE")
        environment = {key: value} if variable else {}
        found.append(
            EngineSpec(
                name, steps, variant, topics_off=topics, accept_length=accept_length, environment=environment
            )
        )
    return found


def cases(contexts: Sequence[int], engines: Sequence[str], tokens: int, left_out: str) -> list[Case]:
    """What is measured at each context. ``left_out`` names ``ENGINE@CONTEXT`` pairs to skip, for a short lease."""
    skip = {tuple(pair.split("@")) for pair in left_out.split(",") if pair}
    found = []
    for context in contexts:
        counts = {}
        for name in engines:
            slow = name.startswith("upstream-eagle3") and context > SLOW_CONTEXT
            if (slow and context > 4 * SLOW_CONTEXT) or (name, str(context)) in skip:
                continue
            counts[name] = SLOW_TOKENS if slow else tokens
        found.append(Case(context, counts))
    return found


def measure(fleet: Fleet, case: Case, rounds: int, deadline: float, machine: str) -> list[Row]:
    """Rows of one context; engines run forth, then back, so that a drifting clock hits all alike."""
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in case.tokens if name in fleet.engines}
    for turn in range(rounds):
        for name in list(figures) if turn % 2 == 0 else list(reversed(figures)):
            if time.monotonic() > deadline:
                break
            try:
                figures[name].append(fleet.measure(name, case.context, tokens=case.tokens[name]))
            except EngineError as error:
                fleet.failures[f"{name} at {case.context}"] = str(error)
    rows = []
    for name, samples in figures.items():
        if samples:
            engine = fleet.engines[name]
            row = plans.row(fleet, engine, samples, case.context, 1, case.tokens[name], machine, started)
            rows.append(dataclasses.replace(row, case={**row.case, "engine": name}))
            metric = row.metrics.get("cycle_ms") or row.metrics["decode_ms"]
            print(
                f"{name:24} {case.context:7} {metric.value:8.3f} ms  spread {metric.spread:.3f}", flush=True
            )
    return rows


def with_state(fleet: Fleet, rows: Sequence[Row]) -> list[Row]:
    """Rows with what their engines say at the end: which path ran, fallbacks by reason, capture times, reductions."""
    states: dict[str, dict[str, Any]] = {}
    for name, engine in fleet.engines.items():
        try:
            states[name] = engine.state()
        except EngineError as error:
            fleet.failures[f"state of {name}"] = str(error)
    found = []
    for row in rows:
        state = states.get(str(row.case["engine"]), {})
        counters = dict(row.counters)
        for path, reasons in state.get("fallbacks", {}).items():
            counters |= {f"fallback.{path}: {reason}": count for reason, count in reasons.items()}
        counters |= {f"count.{name}": value for name, value in state.get("counters", {}).items()}
        counters |= {f"capture_s.{kind}": value for kind, value in state.get("graph_capture_s", {}).items()}
        counters |= reductions(state)
        found.append(dataclasses.replace(row, counters=counters))
    return found


def reductions(state: Mapping[str, Any]) -> dict[str, Scalar]:
    """Who reduced between the ranks of an engine: our launches by graph and method, or why stock did it all.

    A launch in a graph is counted once, when it is captured; ``count.verify_graph_steps`` counts replays.
    """
    found: dict[str, Scalar] = {}
    for group, entry in state.get("all_reduce", {}).items():
        if not entry["ours"]:
            found[f"all_reduce.{group} stock"] = entry["reason"]
            continue
        found |= {f"all_reduce.{group} {place}": count for place, count in entry["launches"].items()}
        lines = dict(entry["lines"])
        found |= {
            f"all_reduce.{group} {name}": lines[name] for name in ("table", "plain", "fused") if name in lines
        }
    return found


def warm_up(fleet: Fleet) -> None:
    """One unmeasured request for every engine."""
    for name in fleet.engines:
        try:
            fleet.measure(name, WARM_CONTEXT, tokens=WARM_TOKENS)
        except EngineError as error:
            fleet.failures[f"warm-up of {name}"] = str(error)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="upstream-decode,upstream-eagle3,fork-decode,fork-eagle3")
    parser.add_argument("--contexts", type=numbers, default=numbers("1k,16k,64k,128k"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="GPUs; each holds the share of one of 8 ranks")
    parser.add_argument(
        "--engine-arguments",
        type=json.loads,
        default={},
        metavar="JSON",
        help='further arguments of every engine, as {"enforce_disable_flashinfer_allreduce_fusion": true}',
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--accept-length", type=float, default=2.0)
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="time limit of the measurements of what is up at once"
    )
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="an engine ends before the next one starts"
    )
    parser.add_argument("--start-seconds", type=float, default=300.0, help="time limit of the start")
    parser.add_argument(
        "--start-when", default="", metavar="FILE", help="measure once this file exists (other work is done)"
    )
    parser.add_argument(
        "--random-router",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="noise in place of the router's logits, so that a verify reads the experts of three tokens",
    )
    parser.add_argument("--leave-out", default="", metavar="ENGINE@CONTEXT,...", help="cases to skip")
    parser.add_argument("--profile-context", type=int, default=1024, help="0: no profile")
    parser.add_argument("--profile-engines", default="", help="default: all")
    parser.add_argument("--profile-tokens", type=int, default=64)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--folder", default="", help="scratch for models and traces (default: temporary)")
    parser.add_argument("--out", default="")
    parser.add_argument("--profile-out", default="")
    return parser.parse_args(argv)


@dataclass
class Run:
    """What a run has so far; a run cut short leaves what was saved last."""

    environments: list[Environment]
    out: str
    rows: list[Row] = field(default_factory=list)
    cycles: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def save(self, more: Sequence[Row] = ()) -> None:
        """Write what there is, and ``more`` behind it."""
        if self.out:
            Results(environments=self.environments, rows=[*self.rows, *more]).save(self.out)


def run_fleet(fleet: Fleet, plan: Sequence[Case], args: argparse.Namespace, folder: Path, run: Run) -> None:
    """Measure and profile the engines that are up; rows, profiles and failures go to ``run``."""
    warm_up(fleet)
    for name, engine in fleet.engines.items():
        # Early, so that a run cut short has said it: graphs are captured by now.
        try:
            said = reductions(engine.state())
        except EngineError as error:
            fleet.failures[f"state of {name}"] = str(error)
            continue
        for what, value in said.items():
            print(f"{name:24} {what}: {value}", flush=True)
    deadline = time.monotonic() + args.seconds
    rows: list[Row] = []
    with under_load(run.environments[0]):
        for case in plan:
            found = measure(fleet, case, args.rounds, deadline, args.machine)
            if args.one_at_a_time:
                found = [dataclasses.replace(r, note="; ".join(filter(None, (r.note, APART)))) for r in found]
            rows += found
            run.save(with_state(fleet, rows))
    run.rows += with_state(fleet, rows)
    run.save()
    if args.profile_context:
        named = [name for name in args.profile_engines.split(",") if name] or list(fleet.engines)
        chosen = [name for name in named if name in fleet.engines]
        run.cycles += profiles(fleet, chosen, args.profile_context, args.profile_tokens, folder / "traces")
    run.failures |= fleet.failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run; status 1 if an engine did not start or a measurement failed."""
    args = parse(argv)
    names = [name.strip() for name in args.engines.split(",")]
    specs = specifications(names, args.accept_length)
    shape = rank_slice(NAMED["kimi-k2.5"], 8, args.layers, args.experts, args.tp)
    plan = cases(args.contexts, names, args.tokens, args.leave_out)
    options = SliceOptions(
        device=args.device,
        backend=args.backend,
        dtype=args.dtype,
        pool_tokens=max(args.contexts) + args.tokens + 4096,
        random_router=args.random_router,
        start_limit_s=args.start_seconds,
        ranks=args.tp,
        arguments=tuple(sorted(args.engine_arguments.items())),
    )
    run = Run([capture()], args.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder or scratch)
        for together in [[spec] for spec in specs] if args.one_at_a_time else [specs]:
            begin = time.monotonic()
            with Fleet(shape, together, folder, options) as fleet:
                print(
                    f"{len(fleet.engines)} of {len(together)} engines up in {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
                await_file(args.start_when, args.start_seconds)
                run_fleet(fleet, plan, args, folder, run)
    named = {spec.name: spec for spec in specs}
    run.rows += [profile_row(entry, named[entry["engine"]], shape, args.machine) for entry in run.cycles]
    run.rows += statistics_cost(run.rows)
    for name, reason in run.failures.items():
        # The error is the first line; the rest is what the engine said last.
        print(f"FAILED {name}: {reason[:300]}\n{reason[300:][-1700:]}", file=sys.stderr)
    run.save()
    if args.profile_out:
        Path(args.profile_out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.profile_out).write_text(json.dumps(run.cycles, indent=1) + "\n", encoding="utf-8")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
