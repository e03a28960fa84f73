"""Test-only plugin: the switch sees made-up step times, so that its live controller meets a world that a test chose.

``SIMULATED_TIMES`` holds milliseconds of a plain step, of a cycle at first, of a cycle later, and the step from which
"later" counts. Ranks but the first see the contrary: a cycle of a tenth of that, so that only agreement keeps them together.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

ENTRY = "simulated_times"
MARK = "the switch sees simulated times"
VARIABLE = "SIMULATED_TIMES"


class Clock:
    """Time that passes by the steps taken."""

    def __init__(self, plain_ms: float, first_ms: float, later_ms: float, change: float) -> None:
        self.plain_ms, self.first_ms, self.later_ms, self.change = plain_ms, first_ms, later_ms, change
        self.seconds, self.steps = 0.0, 0

    def perf_counter(self) -> float:
        """Seconds so far."""
        return self.seconds

    def took(self, mode: str, rank: int) -> None:
        """A step of ``mode`` begins; the next one finds its time passed."""
        cycle = (self.first_ms if self.steps < self.change else self.later_ms) / (10 if rank else 1)
        self.seconds += (self.plain_ms if mode == "plain" else cycle) / 1e3
        self.steps += 1


def activate() -> None:
    """Entry point: put the clock under the switch's runtime."""
    if "sglang.srt.managers.scheduler" not in sys.modules or not os.environ.get(VARIABLE):
        return
    from sglang.srt.speculative.auto import runtime

    clock = Clock(*map(float, os.environ[VARIABLE].split(",")))
    runtime.time = SimpleNamespace(perf_counter=clock.perf_counter)  # type: ignore[assignment]
    real = runtime.Runtime.choose

    def choose(self: Any, batch: Any) -> str:
        mode = real(self, batch)
        clock.took(mode, self.worker.target_worker.model_runner.ps.tp_rank)
        return mode

    runtime.Runtime.choose = choose  # type: ignore[method-assign]
    print(MARK, file=sys.stderr, flush=True)
