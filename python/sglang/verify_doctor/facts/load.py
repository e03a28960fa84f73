"""Clocks, power and link under a short load: at rest a GPU shows neither its clocks nor its link.

Only on request, and only on GPUs that are idle. Nothing is set: no clock, no power limit, no mode.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from sglang.bench_verify import gpu

SECONDS = 3.0
BUSY_PERCENT, BUSY_MIB = 10, 2048
# Besides the kernels a child needs torch's import and a context on each GPU.
GRACE_S = 90.0
_REASONS = {
    "clocks_event_reasons.sw_power_cap": "power limit",
    "clocks_event_reasons.hw_slowdown": "hardware slowdown",
    "clocks_event_reasons.sw_thermal_slowdown": "temperature",
    "clocks_event_reasons.hw_thermal_slowdown": "temperature (hardware)",
    "clocks_event_reasons.hw_power_brake_slowdown": "power brake",
}

_WORK = """
import json, sys, threading, time
import torch

seconds, size = {seconds}, 8192
count = torch.cuda.device_count()
ready, out, failed = threading.Barrier(count + 1), [None] * count, []


def work(index):
    try:
        multiply(index)
    except Exception as error:
        failed.append(f"GPU {{index}}: {{type(error).__name__}}: {{error}}")
        # Nobody else is to wait for it.
        ready.abort()


def multiply(index):
    with torch.cuda.device(index):
        a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        c = torch.empty_like(a)
        torch.matmul(a, b, out=c)
        torch.cuda.synchronize()
        ready.wait()
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(10):
                torch.matmul(a, b, out=c)
            torch.cuda.synchronize()
            done += 10
        out[index] = round(done * 2 * size**3 / (time.perf_counter() - begin) / 1e12, 1)


threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(count)]
for thread in threads:
    thread.start()
try:
    ready.wait()
    print("begin", flush=True)
except threading.BrokenBarrierError:
    pass
for thread in threads:
    thread.join()
# The first that failed; the others' barrier broke for it.
print(json.dumps({{"failed": failed[0]}}) if failed else "end", flush=True)
print(json.dumps(out), flush=True)
"""


def busy(gpus: list[Mapping[str, Any]]) -> list[int]:
    """GPUs that somebody uses."""
    return [
        index
        for index, entry in enumerate(gpus)
        if (entry.get("utilization_percent") or 0) > BUSY_PERCENT
        or (entry.get("memory_used_mib") or 0) > BUSY_MIB
    ]


def gather(gpus: list[Mapping[str, Any]], seconds: float = SECONDS) -> dict[str, Any]:
    """Medians while every GPU multiplies matrices (bf16), each one's rate, and what held its clocks back.

    ``clocks`` holds the fields of ``sglang.bench_verify.gpu.Load``, one value a GPU. ``{"error": text}`` where
    nothing was measured.
    """
    if not gpus:
        return {"error": "no GPU"}
    used = busy(gpus)
    if used:
        return {"error": f"GPU {', '.join(map(str, used))} is in use, and a load would disturb its work"}
    return _measure(_WORK.format(seconds=seconds), seconds + GRACE_S) | {"seconds": seconds}


def _measure(program: str, limit_s: float) -> dict[str, Any]:
    """Run the work and sample between its two marks, so that neither its start nor its end counts."""
    sampler, reasons = gpu.Sampler(0.25), _Reasons()
    rates: list[float | None] = []
    load: gpu.Load | None = None
    failed, started = "", False
    held: list[dict[str, int]] = []
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        watchdog = threading.Timer(limit_s, child.kill)
        watchdog.start()
        try:
            for line in child.stdout or ():
                word = line.strip()
                if word == "begin":
                    sampler.start()
                    reasons.start()
                    started = True
                elif word == "end":
                    load, held = sampler.stop(), reasons.counts()
                elif word.startswith("{"):
                    failed = " ".join(str(json.loads(word).get("failed")).split())
                elif word.startswith("["):
                    rates = json.loads(word)
        finally:
            watchdog.cancel()
            child.kill()
    if started and load is None:
        sampler.stop()
        reasons.counts()
    if failed:
        return {"error": failed[:300]}
    if load is None:
        return {"error": f"the load did not run to its end within {limit_s:.0f} s"}
    return {"clocks": dataclasses.asdict(load), "tflops": rates, "held_back": held}


class _Reasons(gpu.Sampler):
    """Counts, for each GPU, how often the driver gave each reason for a lower clock."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self._counts: list[dict[str, int]] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            for index, row in enumerate(gpu._query({word: name for name, word in _REASONS.items()})):
                while len(self._counts) <= index:
                    self._counts.append({})
                for word, state in row.items():
                    if state == "Active":
                        self._counts[index][word] = self._counts[index].get(word, 0) + 1
            self._stop.wait(self._every_s)

    def counts(self) -> list[dict[str, int]]:
        """End; the counts by GPU."""
        self._stop.set()
        self._thread.join(gpu.PROBE_SECONDS)
        return self._counts
