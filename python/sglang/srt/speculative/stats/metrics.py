"""Prometheus metrics of the speculative cycle, named after upstream's ``sglang:spec_...``.

Created at the first publication, inside the scheduler process: there upstream has already pointed the
client library at the directory that its HTTP process collects from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.speculative.stats.alarm import AcceptanceAlarm
from sglang.srt.speculative.stats.breakeven import Verdict
from sglang.srt.speculative.stats.collector import Window

LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Publisher:
    """The metrics of one scheduler, with upstream's labels on each."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._made: dict[str, Any] = {}
        self._sent: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def publish(
        self,
        window: Window,
        verdict: Verdict | None,
        alarm: AcceptanceAlarm,
        fallbacks: Mapping[str, Mapping[str, int]],
        counts: Mapping[str, float],
        tokens_past_end: int,
    ) -> None:
        """Publish one window; cumulative counts are sent as what was added since the last time."""
        for phase, value in window.phases.mean().items():
            self._gauge(
                "spec_phase_ms", "Milliseconds of a phase of the speculative cycle.", value, phase=phase
            )
        for phase, value in window.phases.ms.items():
            self._add(
                "spec_phase_seconds_total", "Seconds in a phase of timed cycles.", value / 1e3, phase=phase
            )
        self._add("spec_timed_cycles_total", "Speculative cycles that were timed.", window.timed)
        if window.phases.cycles:
            self._gauge("spec_cycle_ms", "Milliseconds of one speculative cycle.", window.phases.cycle_ms)
        if window.kept.cycles:
            self._gauge("spec_kept_length", "Tokens a verify keeps, bonus included.", window.kept.length)
            self._add("spec_cycles_total", "Verifies of a request.", window.kept.cycles)
            for position, rate in enumerate(window.kept.by_position(), 1):
                kept = rate * window.kept.cycles
                self._add("spec_kept_drafts_total", "Draft tokens kept.", kept, position=str(position))
        if verdict is not None:
            self._gauge(
                "spec_decode_ms", "Milliseconds of a plain decode (baseline file).", verdict.decode_ms
            )
            self._gauge(
                "spec_break_even_length", "Accept length at which speculation breaks even.", verdict.needed
            )
            self._gauge(
                "spec_speedup_ratio", "Tokens a second with speculation over without.", verdict.speedup
            )
        self._gauge(
            "spec_acceptance_alarm", "1 while acceptance has collapsed.", float(alarm.active is not None)
        )
        self._total(
            "spec_tokens_past_end_total", "Accepted tokens behind the end of a request.", tokens_past_end
        )
        for path, reasons in fallbacks.items():
            for reason, count in reasons.items():
                text = "Times a fast path handed over to the stock path."
                self._total("spec_fallbacks_total", text, count, path=path, reason=reason)
        for key, value in counts.items():
            name, labels = split_counter(key)
            self._total(f"spec_{name}_total", f"Counter {name} of the fork.", value, **labels)

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._metric("Gauge", name, text, labels).set(value)

    def _add(self, name: str, text: str, amount: float, **labels: str) -> None:
        if amount > 0:
            self._metric("Counter", name, text, labels).inc(amount)

    def _total(self, name: str, text: str, total: float, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        self._add(name, text, total - self._sent.get(key, 0.0), **labels)
        self._sent[key] = total

    def _metric(self, kind: str, name: str, text: str, labels: Mapping[str, str]) -> Any:
        made = self._made.get(name)
        if made is None:
            import prometheus_client

            extra = {"multiprocess_mode": "mostrecent"} if kind == "Gauge" else {}
            made = self._made[name] = getattr(prometheus_client, kind)(
                name=f"sglang:{name}", documentation=text, labelnames=[*self._labels, *labels], **extra
            )
        return made.labels(**self._labels, **labels)


def split_counter(key: str) -> tuple[str, dict[str, str]]:
    """``graph_replays{kind="verify"}`` -> name and labels."""
    name, brace, inner = key.partition("{")
    return re.sub(r"\W", "_", name), dict(LABEL.findall(inner)) if brace else {}


_publisher: Publisher | None = None


def publisher(labels: Mapping[str, str]) -> Publisher:
    """The process's publisher."""
    global _publisher
    if _publisher is None:
        _publisher = Publisher(labels)
    return _publisher
