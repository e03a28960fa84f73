"""What the look for NaN and infinite logits costs a step: microseconds of the device, and of the host that launches it.

``decode`` is one row a request, with and without the levelling that a draw needs; ``verify`` is three rows a request and
the count of good tokens. Device time is a replay of a captured graph of many calls, host time is the calls themselves.
The copy to the host is not in it: it runs beside the next step.

    python benchmark/nonfinite_cost.py --machine h200 --out benchmark/results/h200_nonfinite_cost.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.srt.speculative.semantics.nonfinite import bad_rows, good_run, row_maxima

CALLS = 50
ROUNDS = 7
Work = Callable[[], object]


def plain_operators(logits: torch.Tensor) -> torch.Tensor:
    """The same flags and levelling from PyTorch's operators."""
    bad = bad_rows(logits)
    logits.masked_fill_(bad.unsqueeze(-1), 0.0)
    return bad


def works(batch: int, vocabulary: int) -> dict[str, Work]:
    """The calls that are timed, by name."""
    one = torch.randn(batch, vocabulary, device="cuda")
    three = torch.randn(3 * batch, vocabulary, device="cuda")
    accepted = torch.arange(3 * batch, device="cuda", dtype=torch.int32).view(batch, 3)
    return {
        "decode": lambda: row_maxima(one, level=False),
        "decode-level": lambda: row_maxima(one, level=True),
        "decode-level-operators": lambda: plain_operators(one),
        "verify": lambda: good_run(three, accepted),
    }


def device_us(work: Work) -> list[float]:
    """Microseconds of the device a call, from replays of one graph of ``CALLS`` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    make_event: Any = torch.cuda.Event
    samples = []
    for _ in range(ROUNDS):
        begin, end = make_event(enable_timing=True), make_event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / CALLS * 1e3)
    return samples


def host_us(work: Work) -> list[float]:
    """Microseconds of the host a call, the device idle in between."""
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        samples.append((time.perf_counter() - begin) / CALLS * 1e6)
        torch.cuda.synchronize()
    return samples


def main() -> None:
    """Measure and write one row a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--vocabulary", type=int, default=163_840)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    results = Results(environments=[capture()])
    with under_load(results.environments[0]):
        for batch in map(int, args.batches.split(",")):
            for name, work in works(batch, args.vocabulary).items():
                for _ in range(3):
                    work()
                torch.cuda.synchronize()
                device, host = Metric.of(device_us(work), "us"), Metric.of(host_us(work), "us")
                case = {"work": name, "batch": batch, "vocabulary": args.vocabulary}
                results.add(
                    Row("nonfinite_cost", args.machine, "fork", case, {"device_us": device, "host_us": host})
                )
                print(
                    f"batch {batch:3} {name:36} device {device.value:7.2f} us  host {host.value:7.2f} us",
                    flush=True,
                )
    if args.out:
        results.save(args.out)


if __name__ == "__main__":
    main()
