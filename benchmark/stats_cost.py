"""What the statistics cost: cycles of known work with the hooks on and off, in alternation.

On a GPU a cycle is a captured graph of small kernels a phase, replayed, and the wall time of both loops is compared.
On a CPU the hooks run around nothing and their processor time is compared with the length of a cycle, which a busy
machine cannot disturb. The calls and their order are those of upstream's worker.

    python benchmark/stats_cost.py --machine cpu --out benchmark/results/cpu_stats_cost.json
    python benchmark/stats_cost.py --machine h200 --device cuda --out benchmark/results/h200_stats_cost.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.srt.speculative.stats import collector as collectors
from sglang.srt.speculative.stats import hooks

PHASES = 4
Step = Callable[[], None]


def no_work(_: float) -> Step:
    """A phase on the CPU: nothing, so that what is left is the hooks themselves."""
    return lambda: None


def graph_work(phase_ms: float) -> Step:
    """A phase on the GPU: one graph replay of about ``phase_ms`` of small kernels."""
    import torch

    x = torch.zeros(1 << 16, device="cuda")

    def captured(kernels: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(kernels):
                x.add_(1.0)
        return graph

    # Kernels inside a graph are faster than launched ones: the probe is a graph, too.
    probe, kernels = captured(256), 256
    probe.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        probe.replay()
    torch.cuda.synchronize()
    graph = captured(max(1, round(kernels * phase_ms / ((time.perf_counter() - begin) / 20 * 1e3))))
    replay: Step = graph.replay
    return replay


class Request:
    """A running request as the hooks see it."""

    origin_input_ids = range(1000)
    output_ids = range(100)
    finished_len = None
    customized_info = None

    def finished(self) -> bool:
        """It never ends."""
        return False


class VerifyRunner:
    """A graph runner that takes every batch."""

    capture_forward_mode = SimpleNamespace(is_target_verify=lambda: True)


class DraftRunner:
    """The same for the draft."""


class DraftExtendRunner:
    """The same for the draft's reading of accepted tokens."""


def cycle(step: Step) -> Callable[[bool], None]:
    """One cycle as upstream runs it, hooks of every kind included; the argument says whether they are on."""
    request = Request()
    algorithm = SimpleNamespace(is_none=lambda: False)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        is_extend_in_batch=False,
        reqs=[request],
        spec_algorithm=algorithm,
    )
    result = SimpleNamespace(num_correct_drafts_per_req_cpu=[1], num_correct_drafts=1)
    reporter = SimpleNamespace(
        forward_ct_decode=0,
        decode_log_interval=40,
        is_stats_logging_rank=False,
        current_scheduler_metrics_enabled=False,
    )
    processor = SimpleNamespace(metrics_reporter=reporter)
    worker = SimpleNamespace(device="cuda" if collectors.collector().device != "cpu" else "cpu")
    drafts, verifies, extends = DraftRunner(), VerifyRunner(), DraftExtendRunner()

    def graph(runner: Any) -> None:
        hooks.may_replay(lambda *_: True, runner, batch)
        hooks.replayed(lambda _: step(), runner)

    def sample() -> None:
        step()

    def verify(_: Any) -> None:
        graph(verifies)
        hooks.sample(sample)

    def hooked(_: Any, __: Any) -> None:
        graph(drafts)
        hooks.verify(verify, None)
        hooks.draft_extend(lambda _: graph(extends), None)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def run(on: bool) -> None:
        if on:
            hooks.cycle(hooked, worker, batch)
            hooks.settled(nothing, processor, request, batch, result, 0, None)
            reporter.forward_ct_decode += 1
            hooks.report(nothing, reporter, True, running_batch=batch)
        else:
            for _ in range(PHASES):
                step()

    return run


def timed(run: Callable[[bool], None], on: bool, cycles: int, device: str) -> float:
    """Milliseconds a cycle: wall time on a GPU, processor time on a CPU."""
    clock = time.thread_time if device == "cpu" else time.perf_counter
    begin = clock()
    for _ in range(cycles):
        run(on)
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
    return (clock() - begin) / cycles * 1e3


def main() -> None:
    """Measure and write one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--cycle-ms", type=float, default=3.0, help="length of a cycle")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--every", type=int, default=0, help="time one of so many cycles (0 = the server's default)"
    )
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.every:
        os.environ[collectors.EVERY_VARIABLE] = str(args.every)
    stats = collectors.collector(args.device)
    work = no_work if args.device == "cpu" else graph_work
    run = cycle(work(args.cycle_ms / PHASES))
    results = Results(environments=[capture()])
    for on in (False, True):
        timed(run, on, 20, args.device)
    pairs: list[tuple[float, float]] = []
    with under_load(results.environments[0]):
        for index in range(args.rounds):
            order = (False, True) if index % 2 == 0 else (True, False)
            times = {on: timed(run, on, args.cycles, args.device) for on in order}
            pairs.append((times[False], times[True]))
    # Around nothing there is no cycle to relate to but the one that was asked for.
    base = [args.cycle_ms if args.device == "cpu" else off for off, _ in pairs]
    percents = [100 * (on - off) / whole for (off, on), whole in zip(pairs, base, strict=True)]
    row = Row(
        bench="stats_cost",
        machine=args.machine,
        variant="fork",
        case={"cycle_ms": args.cycle_ms, "cycles": args.cycles, "every": stats.clock.every},
        metrics={
            "overhead_percent": Metric(statistics.median(percents), "percent", tuple(percents)),
            "overhead_us": Metric.of([1e3 * (on - off) for off, on in pairs], "us"),
            "off_ms": Metric.of([off for off, _ in pairs], "ms"),
            "on_ms": Metric.of([on for _, on in pairs], "ms"),
        },
    )
    results.add(row)
    for name, metric in row.metrics.items():
        print(
            f"{name}: {metric.value:.4f} {metric.unit} (spread {min(metric.samples):.4f} .. {max(metric.samples):.4f})"
        )
    if args.out:
        results.save(args.out)


if __name__ == "__main__":
    main()
