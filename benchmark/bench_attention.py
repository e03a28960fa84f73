"""Attention of verify and decode, one kernel call at a time: the fork, upstream's kernels and flashinfer's MLA.

Every case lays the cache out as a model does: one pool a layer, all layers under the same slots, the slots of
a request in random order. ``in_loop`` times a graph that walks over enough layers that no layer's cache is
still in L2 when its turn comes again; lengths and tables stay warm, as in a model. ``cold`` puts a flush of L2
before every call and subtracts the time of the flushes alone: L2 is full of lines that have to be written back, and nothing of the
call is in it, queries neither. ``cold_clean`` is nearer to a model: what is in L2 has been read, as weights are, and a kernel in
front of the call has just written the queries. Times are medians over graph replays.

    python benchmark/bench_attention.py --out benchmark/results/attention_h200.json

A graph is one forward pass to the fork: where its kernels read a work list, the launch that writes it is in the graph, once.
``warpgroup-unlisted`` is the same without a list.

``--backends fork one-launch two-launches`` compares the fork's own two paths; names of ``attention_trials`` add what is
only being tried, ``trials`` all of them. ``--compile-jobs`` compiles beforehand in so many processes, which takes most of
the time of a first run otherwise. ``--max-context`` plans as a server does, whose requests may become that long.

Bytes count every cached key once, whatever a kernel reads. The share is of a device-to-device copy measured in
the same process (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from attention_cases import HEADS, L2_BYTES, PATHS, UNLISTED, Call, Case, ForkCall, Setup, fork_call
from attention_rivals import flashinfer_call, upstream_decode_call, upstream_verify_call
from attention_trials import CHANGES, WARPGROUP_CHANGES
from sglang.bench_verify.environment import capture
from sglang.bench_verify.rows import Metric, Results, Row

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 4, 8, 32)
TOKENS = (3, 1)
MODES = ("in_loop", "cold", "cold_clean")
# What a case can be timed with; a name that is none of them would be left out without a word.
BACKENDS = ("fork", *PATHS, *UNLISTED, *CHANGES, *WARPGROUP_CHANGES, "trials", "upstream", "flashinfer")
# Upstream's serial verify kernel takes milliseconds: beyond this many keys a call it is not worth the time.
SERIAL_KEYS = 8 * 65536


def graph_of(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture ``body`` after one run of it outside."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def event() -> Any:
    """A CUDA event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Device microseconds of each replay."""
    times = []
    for _ in range(2):
        graph.replay()
    for _ in range(repeats):
        begin, end = event(), event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def begin_pass(call: Call) -> None:
    """What follows is a forward pass: the fork writes its work list once in it, inside the graph that is timed."""
    if isinstance(call, ForkCall):
        call.begin()


# Fewer and the first call, which nothing runs in front of, and the end of the last one count for too much: with the two layers
# that a case of 64k keys has, 2.5 us a call.
LOOP_CALLS = 24


def in_loop_us(call: Call, layers: int, repeats: int, least: int = LOOP_CALLS) -> list[float]:
    """Microseconds a call, walking over all layers, more than once if they are fewer than ``least``."""
    rounds = -(-least // layers)

    def body() -> None:
        begin_pass(call)
        for _ in range(rounds):
            for layer in range(layers):
                call(layer)

    return [t / (rounds * layers) for t in replay_us(graph_of(body), repeats)]


def written(flush: torch.Tensor) -> Callable[[], None]:
    """Fill L2 with lines that are not in memory yet."""

    def run() -> None:
        flush.zero_()

    return run


def read_then_queries(flush: torch.Tensor, queries: torch.Tensor) -> Callable[[], None]:
    """Fill L2 with lines that are in memory too, then write the queries, as a layer's projections do."""
    words, total, source = (
        flush.view(torch.int64),
        torch.empty((), dtype=torch.int64, device=flush.device),
        queries.clone(),
    )

    def run() -> None:
        torch.sum(words, dim=0, out=total)
        queries.copy_(source)

    return run


def cold_us(call: Call, layers: int, repeats: int, before: Callable[[], None]) -> list[float]:
    """Microseconds a call behind ``before``, of which the time alone is subtracted."""
    count = min(layers, 8)

    def body(with_call: bool) -> None:
        begin_pass(call)
        for layer in range(count):
            before()
            if with_call:
                call(layer)

    alone = sorted(replay_us(graph_of(lambda: body(False)), repeats))[repeats // 2]
    return [(t - alone) / count for t in replay_us(graph_of(lambda: body(True)), repeats)]


def copy_bandwidth() -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)

    # Not from a graph: there the copy becomes a node of the copy engine, which is slower than the kernel.
    times = []
    for _ in range(12):
        begin, end = event(), event()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(2 * source.numel() / sorted(times)[6] / 1e6)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def backends(case: Case, wanted: Sequence[str]) -> dict[str, Callable[[Setup], tuple[Call, str]]]:
    """What can run ``case``, the fork first: the others' output is compared with its."""
    found: dict[str, Callable[[Setup], tuple[Call, str]]] = {
        "fork": fork_call,
        **{name: lambda setup, name=name: fork_call(setup, name) for name in (*PATHS, *UNLISTED)},  # type: ignore[misc]
        **{
            name: lambda setup, change=change: fork_call(setup, "two-launches", change)  # type: ignore[misc]
            for name, change in CHANGES.items()
        },
        **{
            name: lambda setup, change=change: fork_call(setup, "warpgroup", change)  # type: ignore[misc]
            for name, change in WARPGROUP_CHANGES.items()
        },
    }
    if "upstream" in wanted:
        if case.tokens == 1:
            found["upstream"] = upstream_decode_call
        elif case.context * case.batch <= SERIAL_KEYS:
            found["upstream"] = upstream_verify_call
    if "flashinfer" in wanted and not case.fp8:
        found["flashinfer"] = flashinfer_call
    if case.fp8:
        for name in ("warpgroup", *UNLISTED, *WARPGROUP_CHANGES):
            del found[name]
    return {name: make for name, make in found.items() if name in wanted}


def measure(case: Case, args: argparse.Namespace, copy: float, flush: torch.Tensor, results: Results) -> None:
    """All backends on one case; appends rows and prints a line each."""
    setup = Setup(case, "cuda", args.budget_gib * 2**30, args.max_context)
    reference: torch.Tensor | None = None
    for name, make in backends(case, args.backends).items():
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        facts: dict[str, Any] = asdict(case) | {"backend": name, "kv": "fp8" if case.fp8 else "bf16"}
        if args.max_context:
            facts["max_context"] = setup.max_context
        del facts["fp8"]
        try:
            call, how = make(setup)
            call(0)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name} {case}: {error!r:.300}", flush=True)
            continue
        result = setup.out.clone()
        reference = result if reference is None else reference
        difference = relative_error(result, reference)
        begin = time.perf_counter()
        call(0)
        torch.cuda.synchronize()
        slow = time.perf_counter() - begin > 2e-3
        repeats, layers = (3, 2) if slow else (args.repeats, setup.layers)
        fronts = {"cold": written(flush), "cold_clean": read_then_queries(flush, setup.q)}
        for mode in args.modes:
            if mode == "in_loop":
                samples = in_loop_us(call, layers, repeats, 1 if slow else LOOP_CALLS)
            elif case.batch == 1:
                samples = cold_us(call, layers, repeats, fronts[mode])
            else:
                continue
            time_us = Metric.of([round(s, 3) for s in samples], "us")
            rate = setup.bytes / time_us.value / 1e6
            metrics = {
                "us": time_us,
                "tb_s": Metric(round(rate, 4), "TB/s"),
                "share_of_copy": Metric(round(rate / copy, 4), "ratio"),
            }
            if mode == "in_loop" and not case.fp8 and name in ("fork", "upstream"):
                metrics["mla_verify_us"] = time_us
            variant = "upstream" if name in ("upstream", "flashinfer") else "fork"
            results.add(
                Row(
                    bench="attention",
                    machine=args.machine,
                    variant=variant,
                    case=facts | {"mode": mode, "heads": HEADS},
                    metrics=metrics,
                    counters={"layers": layers, "difference_from_fork": round(difference, 6)},
                    started=started,
                    note=how,
                )
            )
            print(
                f"T{case.tokens} bs{case.batch:<2d} {case.context:6d} {facts['kv']} {mode:10s} {name:10s} "
                f"{time_us.value:9.2f} us {rate:5.2f} TB/s {rate / copy:5.2f} diff {difference:.1e}",
                flush=True,
            )


COMPILE_LIMIT_S = 240.0


def compile_ahead(jobs: int, argv: Sequence[str]) -> None:
    """Run every case once in ``jobs`` other processes, whose kernels this one then finds in the compilers' caches."""
    begun = time.monotonic()
    script = str(Path(__file__).resolve())
    running = [
        subprocess.Popen([sys.executable, script, *argv, "--compile-part", str(i), str(jobs)])
        for i in range(jobs)
    ]
    for process in running:
        try:
            process.wait(max(1.0, COMPILE_LIMIT_S - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)


def compile_part(cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Make the first call of every ``jobs``-th backend and case, on few layers."""
    part, jobs = args.compile_part
    work = [(case, name) for case in cases for name in args.backends]
    for case, name in work[part::jobs]:
        make = backends(case, [name]).get(name)
        if make is None or name in ("upstream", "flashinfer"):
            continue
        try:
            make(Setup(case, "cuda", 0, args.max_context))[0](0)
        except Exception as error:
            print(f"compiling {name} {case}: {error!r:.200}", flush=True)
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the table and write the rows."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["fork", "upstream", "flashinfer"])
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kv", nargs="+", choices=("bf16", "fp8"), default=("bf16", "fp8"))
    parser.add_argument("--max-context", type=int, default=0, help="plan for requests up to this long")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--budget-gib", type=int, default=24, help="device memory for the layers of one case")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop starting new cases after this long")
    parser.add_argument("--compile-jobs", type=int, default=0)
    parser.add_argument("--compile-part", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if "trials" in args.backends:
        args.backends = [*(name for name in args.backends if name != "trials"), *CHANGES]
    cases = [
        Case(tokens, batch, context, kv == "fp8")
        for kv in args.kv
        for batch in args.batches
        for context in args.contexts
        for tokens in args.tokens
    ]
    if not torch.cuda.is_available():
        print(f"no CUDA device; {len(cases)} cases planned", file=sys.stderr)
        return 2
    if args.compile_part:
        compile_part(cases, args)
        return 0
    begun = time.monotonic()
    if args.compile_jobs:
        compile_ahead(args.compile_jobs, argv)
    results = Results(environments=[capture(root=Path(__file__).resolve().parent)])
    copy = copy_bandwidth()
    results.add(
        Row("copy", args.machine, "upstream", {"bytes": 2**31}, {"copy": Metric(round(copy, 4), "TB/s")})
    )
    flush = torch.empty(4 * L2_BYTES, dtype=torch.uint8, device="cuda")
    print(f"copy {copy:.3f} TB/s", flush=True)
    left_out = []
    for case in cases:
        if time.monotonic() - begun > args.limit_s:
            left_out.append(asdict(case))
            continue
        measure(case, args, copy, flush, results)
        torch.cuda.empty_cache()
        results.save(args.out)
    if left_out:
        print(f"left out after {args.limit_s} s: {json.dumps(left_out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
