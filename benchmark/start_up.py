"""What a start costs: seconds until an engine answers, seconds and memory of its graphs, the fork over upstream.

EAGLE-3 (a chain of 3) on a one-rank slice of Kimi-K2, one engine at a time on an otherwise idle GPU: upstream's, the fork's
as it comes (the switch on, which captures plain decode as well) and the fork's with ``--speculative-auto off``. Each
round starts all of them, in the reverse order of the round before.

    python benchmark/start_up.py --machine h200 --out benchmark/results/h200_start_up.json

``ready_s`` is from the start of the process to an engine that takes requests. Of it, one after the other: ``import_s`` the
launcher's imports, ``launch_s`` its checks of the arguments, the start of the scheduler's process and that one's imports,
``scheduler_s`` the scheduler's own start with all graphs, of which ``kv_cache_s`` made pools. ``answer_s`` the first request after it (8
tokens), so that work put off until then shows. ``capture_<kind>_s`` and ``capture_s``, their sum, are what upstream's workers report
of their graphs, with the fork's parent graphs (``cycle``) and the switch's ``plain_decode`` beside them; ``graphs_gib`` is the same
for memory, ``device_gib`` all that the process holds on the device once it is ready.

Figures are of starts with warm kernel caches, and a row says how it knows: a start that compiled (machine code appeared in a cache)
is ``first`` and left out of the figures where a later one of its engine is there; a first start that compiled nothing counts.
A start is not begun where the longest one so far that did not compile would end behind ``--limit``. The file is written after each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.bench_verify.environment import capture
from sglang.bench_verify.gpu import probe
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.bench_verify.slice.engines import EngineError, EngineSpec, Fleet, SliceOptions, stock_topics
from sglang.bench_verify.slice.shapes import NAMED, rank_slice
from sglang.srt.layers.attention.verify.fused_build import cache_directory

UPSTREAM, SWITCHED, UNSWITCHED = "upstream-eagle3", "fork-eagle3", "fork-eagle3-auto-off"
# Who is compared stands in the middle: a run that ends after four or five starts has them twice.
ENGINES = (UNSWITCHED, UPSTREAM, SWITCHED)
ANSWER_CONTEXT, ANSWER_TOKENS = 512, 8
# What the compilers leave behind; their locks and build files come anew with every start.
MACHINE_CODE = (".cubin", ".so")
GIB = 2**30
RATIOS = {
    "ready_over_upstream": "ready_s",
    "capture_over_upstream": "capture_s",
    "graphs_over_upstream": "graphs_gib",
    "device_over_upstream": "device_gib",
}


@dataclass
class Start:
    """One start of one engine. ``metrics`` by name, ``compiled`` new files of machine code, ``state`` of the scheduler."""

    metrics: dict[str, float]
    compiled: int
    state: Mapping[str, Any] = field(default_factory=dict)


def specs() -> dict[str, EngineSpec]:
    """The engines. Acceptance is real: where it is simulated the switch stays off."""
    return {
        UPSTREAM: EngineSpec(
            UPSTREAM, variant="upstream", topics_off=stock_topics(), accept_length=None
        ),
        SWITCHED: EngineSpec(SWITCHED, accept_length=None),
        UNSWITCHED: EngineSpec(UNSWITCHED, accept_length=None, arguments={"speculative_auto": "off"}),
    }  # fmt: skip


def order(names: Sequence[str], rounds: int) -> list[str]:
    """Names in the order of their starts: forth and back in turn."""
    return [name for turn in range(rounds) for name in (names if turn % 2 == 0 else list(reversed(names)))]


def cache_folders() -> list[Path]:
    """Where the compilers that an engine may call keep machine code."""
    home = Path.home()
    variables = os.environ
    return [
        Path(variables.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        Path(variables.get("TVM_FFI_CACHE_DIR") or home / ".cache" / "tvm-ffi"),
        Path(variables.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
        cache_directory(),
    ]


def machine_code(folders: Sequence[Path]) -> set[str]:
    """Paths of the machine code that is cached now."""
    return {
        str(path)
        for folder in folders
        if folder.is_dir()
        for path in folder.rglob("*")
        if path.suffix in MACHINE_CODE
    }


def device_gib() -> float | None:
    """Memory taken on the first GPU; None without a driver."""
    said = probe("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
    return float(said[0]) / 1024 if said else None


def graph_figures(state: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of capture by kind and in all, and memory of all graphs in GiB, from what ``host.state`` tells."""
    counters = state.get("counters", {})
    seconds = {kind: float(value) for kind, value in state.get("graph_capture_s", {}).items()}
    # Upstream's workers do not know these two: the parent graphs, and plain decode beside verify.
    apart = {
        "cycle": "cycle_graph_capture_{}",
        "plain_decode": 'graph_capture_{}{{kind="decode"}}',
    }
    extra = 0.0
    for kind, name in apart.items():
        if name.format("seconds") in counters and not (kind == "plain_decode" and "decode" in seconds):
            seconds[kind] = float(counters[name.format("seconds")])
            extra += float(counters.get(name.format("bytes"), 0)) / GIB
    found = {f"capture_{kind}_s": value for kind, value in seconds.items()}
    found["capture_s"] = sum(seconds.values())
    usage = state.get("memory_usage", {}).get("graph")
    if usage is not None:
        found["graphs_gib"] = sum(map(float, usage.values())) + extra
    return found


def part_figures(state: Mapping[str, Any], engine_s: float, import_s: float) -> dict[str, float]:
    """Seconds of the parts of a start, from what upstream's scheduler tells of its own."""
    told = state.get("startup_time", {})
    names = {
        "load_weight_s": "load_weight",
        "kv_cache_s": "kv_cache_allocation",
        "scheduler_s": "scheduler_e2e",
    }
    found = {name: float(told[key]) for name, key in names.items() if told.get(key) is not None}
    found["import_s"] = import_s
    if "scheduler_s" in found:
        found["launch_s"] = engine_s - import_s - found["scheduler_s"]
    return found


def start(shape: Any, spec: EngineSpec, options: SliceOptions, folder: Path) -> Start:
    """Start one engine, ask it once and end it.

    Raises:
        EngineError: it did not start or answer, or the switch is not as the engine's name says.
    """
    folders = cache_folders()
    cached, taken = machine_code(folders), device_gib()
    begin = time.monotonic()
    with Fleet(shape, [spec], folder, options) as fleet:
        if spec.name not in fleet.engines:
            raise EngineError(fleet.failures[spec.name])
        engine = fleet.engines[spec.name]
        metrics = {"ready_s": time.monotonic() - begin, "engine_s": engine.startup_s}
        held = device_gib()
        # Before the request: what that compiles is no part of the start.
        compiled = len(machine_code(folders) - cached)
        begin = time.monotonic()
        engine.generate(ANSWER_CONTEXT, 1, ANSWER_TOKENS)
        metrics["answer_s"] = time.monotonic() - begin
        if held is not None and taken is not None:
            metrics["device_gib"] = held - taken
        state = engine.state()
    metrics |= graph_figures(state) | part_figures(state, engine.startup_s, engine.import_s)
    if (spec.name == SWITCHED) != ("capture_plain_decode_s" in metrics):
        raise EngineError(f"the switch: {state.get('speculative_auto')}, graphs {sorted(metrics)}")
    return Start(metrics, compiled, state)


def counted(starts: Sequence[Start]) -> tuple[list[Start], str]:
    """The starts that figures are made of, and what they say of the caches."""
    warm = [item for item in starts if not item.compiled]
    if not warm:
        counts = " and ".join(str(item.compiled) for item in starts)
        which = "its only start" if len(starts) == 1 else "its starts"
        return list(starts), f"cold: {which} compiled {counts} kernels"
    if len(warm) < len(starts):
        counts = " and ".join(str(item.compiled) for item in starts if item.compiled)
        return warm, f"warm: starts that compiled {counts} kernels are left out"
    return warm, "warm: carried along, the first start compiled nothing"


def rows_of(starts: Mapping[str, Sequence[Start]], known: Mapping[str, EngineSpec], common: Row) -> list[Row]:
    """A row of each engine that started: ratios to upstream first, between warm starts only."""
    kept = {name: counted(items) for name, items in starts.items() if items}
    medians = {
        name: {metric: Metric.of([item.metrics[metric] for item in items], unit_of(metric)) for metric in shared(items)}
        for name, (items, _) in kept.items()
    }  # fmt: skip
    rows = []
    for name, (_, caches) in kept.items():
        metrics = dict(medians[name])
        base = medians.get(UPSTREAM, {})
        if name != UPSTREAM and not any(
            kept[which][1].startswith("cold") for which in kept if which in (name, UPSTREAM)
        ):
            ratios = {
                ratio: Metric(metrics[metric].value / base[metric].value, "ratio")
                for ratio, metric in RATIOS.items()
                if metric in metrics and metric in base and base[metric].value > 0
            }
            metrics = ratios | metrics
        rows.append(
            Row(
                bench=common.bench,
                machine=common.machine,
                variant=known[name].variant,
                case={**common.case, "engine": name, "draft_tokens": known[name].draft_tokens},
                metrics=metrics,
                counters={
                    "starts": len(starts[name]),
                    "compiled": " ".join(str(item.compiled) for item in starts[name]),
                    "ready_s of each": " ".join(f"{item.metrics['ready_s']:.2f}" for item in starts[name]),
                    "caches": caches.partition(":")[0],
                    **captured(starts[name][-1].state),
                },
                topics_off=known[name].topics_off,
                started=common.started,
                note=f"kernel caches {caches}",
            )
        )
    # Who is compared before whom it is compared with.
    return sorted(rows, key=lambda row: row.variant == "upstream")


def shared(items: Sequence[Start]) -> list[str]:
    """Metrics that every one of these starts has, in the order of the first."""
    return [name for name in items[0].metrics if all(name in item.metrics for item in items)]


def unit_of(metric: str) -> str:
    """``_gib`` figures are GiB, all others seconds."""
    return "GiB" if metric.endswith("_gib") else "s"


def captured(state: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and bytes by kind as the fork counts them, and what upstream says of memory by kind."""
    counters = state.get("counters", {})
    found = {
        name: value
        for name, value in counters.items()
        if name.startswith(("graph_capture", "cycle_graph_capture"))
    }
    usage = state.get("memory_usage", {}).get("graph") or {}
    return found | {f"graph_gib.{kind}": value for kind, value in usage.items() if value}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--out", default="")
    parser.add_argument("--folder", default="", help="scratch for models (default: temporary)")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of all starts together")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument(
        "--max-batch", type=int, default=8, help="graphs are captured for 1 to so many requests"
    )
    parser.add_argument("--pool-tokens", type=int, default=66048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start and write the rows; status 1 if an engine failed or none started, 130 if it was interrupted."""
    args = parse(argv)
    known = specs()
    names = [name for name in args.engines.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--engines {unknown[0]!r} is not one of {', '.join(known)}")
    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=args.layers, experts=args.experts)
    options = SliceOptions(
        device=args.device,
        backend=args.backend,
        max_batch=args.max_batch,
        random_router=False,
        pool_tokens=args.pool_tokens,
    )
    environment = capture()
    common = Row(
        bench="start_up",
        machine=args.machine,
        variant="fork",
        case={
            "model": shape.name, "layers": shape.layers, "experts": shape.experts, "max_batch": args.max_batch,
            "pool_tokens": options.pool_tokens,
        },
        metrics={},
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )  # fmt: skip
    starts: dict[str, list[Start]] = {name: [] for name in names}
    failed, expected, began = False, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for index, name in enumerate(order(names, args.rounds)):
                begin = time.monotonic()
                if begin - began + expected > args.limit:
                    print(
                        f"ended before start {index + 1}: another {expected:.0f} s would pass --limit",
                        flush=True,
                    )
                    break
                try:
                    found = start(shape, known[name], options, Path(args.folder or scratch))
                except EngineError as error:
                    failed = True
                    print(f"FAILED {name}: {str(error)[-1500:]}", flush=True)
                    continue
                if not found.compiled:
                    expected = max(expected, time.monotonic() - begin)
                starts[name].append(found)
                figures = {metric: round(value, 3) for metric, value in found.metrics.items()}
                print(f"{name:22} compiled {found.compiled:3} {figures}", flush=True)
                if args.out:
                    Results(environments=[environment], rows=rows_of(starts, known, common)).save(args.out)
        except KeyboardInterrupt:
            print("interrupted: the file holds the starts before", flush=True)
            return 130
    rows = rows_of(starts, known, common)
    for row in rows:
        print(
            row.case["engine"],
            {name: round(metric.value, 4) for name, metric in row.metrics.items()},
            row.note,
        )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
