"""The statistics of one scheduler process: clock, kept tokens, alarm, baseline."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.speculative.stats import baseline as baselines
from sglang.srt.speculative.stats.accept import KeptHistogram
from sglang.srt.speculative.stats.alarm import AcceptanceAlarm, Alarm
from sglang.srt.speculative.stats.breakeven import Verdict, judge
from sglang.srt.speculative.stats.clock import CycleClock, WallStamp
from sglang.srt.speculative.stats.graphs import GraphLog
from sglang.srt.speculative.stats.totals import PhaseTotals

logger = logging.getLogger(__name__)

EVERY_VARIABLE = "SGLANG_SPEC_STATS_EVERY"
# On a GPU one cycle in four is timed: six events a timed cycle then cost well under 1% of the shortest
# cycle, and a log interval still averages ten of them.
EVERY_ON_GPU = 4


@dataclass
class Window:
    """What happened since the last report."""

    phases: PhaseTotals = field(default_factory=PhaseTotals)
    kept: KeptHistogram = field(default_factory=KeptHistogram)
    batch_sum: int = 0
    context_sum: int = 0
    timed: int = 0

    @property
    def batch(self) -> int:
        """Mean requests of a timed cycle, rounded."""
        return round(self.batch_sum / self.timed) if self.timed else 0

    @property
    def context(self) -> int:
        """Mean prefix of a request in a timed cycle."""
        return round(self.context_sum / self.timed) if self.timed else 0


class Collector:
    """Gathers the statistics of one process. Not thread-safe: the scheduler's loop is one thread."""

    def __init__(self, device: str = "cpu", every: int | None = None) -> None:
        self.device = device
        self.clock = CycleClock(*_stamps(device), every=every or _every(device))
        self.totals = PhaseTotals()
        self.decode = PhaseTotals()
        self.kept = KeptHistogram()
        self.alarm = AcceptanceAlarm()
        self.baseline = baselines.from_environment()
        self.window = Window()
        self.graphs = GraphLog()
        self.tokens_past_end = 0

    def read(self) -> None:
        """Add the cycles that the device has passed; never waits."""
        for times in self.clock.drain():
            if times.kind == "decode":
                self.decode.add(times.ms, times.host_ms)
                # Only a whole interval is a token's time.
                if "host_gap" in times.ms:
                    self.baseline.record(times.batch, times.context, sum(times.ms.values()))
                continue
            self.totals.add(times.ms, times.host_ms)
            self.window.phases.add(times.ms, times.host_ms)
            self.window.batch_sum += times.batch
            self.window.context_sum += times.context
            self.window.timed += 1

    def settle(self, kept: int) -> None:
        """Count one request's verify that kept ``kept`` tokens, bonus included."""
        self.kept.add(kept)
        self.window.kept.add(kept)
        found = self.alarm.add(1, max(0, kept - 1))
        if found is not None:
            self._shout(found)

    def verdict(self, window: Window) -> Verdict | None:
        """The break-even of a window; None without timed cycles, kept tokens or a baseline."""
        cycle = window.phases.cycle_ms
        decode = self.baseline.decode_ms(window.batch, window.context) if window.timed else None
        if cycle <= 0 or decode is None or not window.kept.cycles:
            return None
        return judge(cycle, decode, window.kept.length)

    def take_window(self) -> Window:
        """The window so far; a new one begins."""
        taken, self.window = self.window, Window()
        return taken

    def _shout(self, alarm: Alarm) -> None:
        logger.warning("%s", alarm.text)


def line(window: Window, verdict: Verdict | None) -> str:
    """The periodic log line; empty when there is nothing to say."""
    if not window.kept.cycles:
        return ""
    means = window.phases.mean()
    parts = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())
    rates = " ".join(f"{100 * rate:.0f}%" for rate in window.kept.by_position())
    if verdict is not None:
        head = verdict.text()
    elif means:
        # Without a baseline the same comparison turned round: the decode time that speculation must beat.
        cycle = window.phases.cycle_ms
        head = (
            f"cycle {cycle:.2f} ms, keeps {window.kept.length:.2f}: "
            f"wins where a plain decode takes more than {cycle / window.kept.length:.2f} ms"
        )
    else:
        head = f"keeps {window.kept.length:.2f}"
    tail = f" ({parts} ms)" if parts else ""
    return f"Speculation: {head}{tail}" + (f", kept by position {rates}" if rates else "")


def _every(device: str) -> int:
    default = 1 if device == "cpu" else EVERY_ON_GPU
    text = os.environ.get(EVERY_VARIABLE, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        logger.warning(
            "%s=%r is not a whole number of at least 1; timing one cycle in %d", EVERY_VARIABLE, text, default
        )
        return default
    return value


def _stamps(device: str) -> tuple[Any]:
    if device == "cpu":
        return (WallStamp,)
    import torch

    module: Any = torch.get_device_module(device)
    return (lambda: module.Event(enable_timing=True),)


_process: Collector | None = None


def collector(device: str | None = None) -> Collector:
    """The process's collector; the first caller that knows the device makes it."""
    global _process
    if _process is None:
        _process = Collector(device or "cpu")
    return _process


def reset() -> None:
    """Forget everything (for tests)."""
    global _process
    _process = None
