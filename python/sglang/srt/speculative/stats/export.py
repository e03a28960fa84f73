"""How the statistics leave the scheduler: in answers, in ``/server_info``, as metrics, as a baseline file."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from sglang.fork import counters, fallbacks, report
from sglang.srt.speculative.auto.plain import plain_steps_of
from sglang.srt.speculative.stats import baseline as baselines
from sglang.srt.speculative.stats import metrics, paths
from sglang.srt.speculative.stats.accept import position_rates
from sglang.srt.speculative.stats.breakeven import Verdict
from sglang.srt.speculative.stats.collector import Collector, Window
from sglang.srt.speculative.stats.ranks import rank_records
from sglang.srt.speculative.stats.totals import PhaseTotals

START_ATTRIBUTE = "_spec_stats_start"


def follow(stats: Collector, req: Any) -> None:
    """Remember where the totals stood at a request's first verify."""
    if not hasattr(req, START_ATTRIBUTE):
        setattr(req, START_ATTRIBUTE, stats.totals.copy())


def attach_summary(stats: Collector, req: Any, key: str) -> None:
    """Put a finished request's summary on the way to its answer.

    Upstream carries per-token values from the scheduler to the answer; the summary rides on the last
    token, and the other tokens carry nothing.
    """
    length = len(req.output_ids_through_stop)
    if not length:
        return
    start = getattr(req, START_ATTRIBUTE, None)
    phases = stats.totals.since(start) if start is not None else stats.totals
    if not phases.cycles:
        # A request shorter than the sampling interval had no timed cycle of its own.
        phases = stats.totals
    info = dict(req.customized_info or {})
    summary = _summary(stats, phases, len(req.origin_input_ids) + length)
    if plain := plain_steps_of(req):
        summary["plain_steps"] = plain
    info[key] = [None] * (length - 1) + [summary]
    req.customized_info = info


def _summary(stats: Collector, phases: Any, context: int) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "clock": "host" if stats.device == "cpu" else "device",
        "timed_cycles": phases.cycles,
        "cycle_ms": round(phases.cycle_ms, 4),
    }
    for name, value in phases.mean().items():
        summary[f"{name}_ms"] = round(value, 4)
    summary["launch_ms"] = round(sum(v for name, v in phases.mean_host().items() if name != "host_gap"), 4)
    decode = stats.baseline.decode_ms(1, context)
    if decode is not None:
        summary["decode_ms"] = round(decode, 4)
    return summary


def unpack_summary(meta: dict[str, Any], key: str, width: int | None = None) -> None:
    """Turn the per-token list into the summary, and add what follows from the acceptance histogram.

    ``spec_kept_length`` is bonus + drafts a verify and never exceeds the draft width; upstream's
    ``spec_accept_length`` also counts the token that the prefill gave.
    """
    values = meta.pop(key, None)
    if isinstance(values, list):
        last = next((value for value in reversed(values) if value is not None), None)
        if last is not None:
            meta[key] = last
    histogram = meta.get("spec_correct_drafts_histogram")
    verifies = meta.get("spec_verify_ct")
    summary = meta.get(key)
    if verifies and isinstance(summary, dict) and summary.get("plain_steps"):
        # Upstream divides all tokens by the verifies; those of plain steps had none.
        meta["spec_accept_length"] = (meta["completion_tokens"] - summary["plain_steps"]) / verifies
    if histogram and verifies:
        drafts = sum(index * count for index, count in enumerate(histogram))
        meta["spec_kept_length"] = 1.0 + drafts / verifies
        meta["spec_kept_by_position"] = [round(rate, 4) for rate in position_rates(histogram, width)]


def snapshot(stats: Collector, scheduler: Any) -> dict[str, Any]:
    """Everything the process knows, as plain builtins."""
    state = report()
    return {
        "clock": "host" if stats.device == "cpu" else "device",
        "cycles": stats.kept.cycles,
        "timed_cycles": stats.clock.timed,
        "dropped_cycles": stats.clock.dropped,
        "phase_ms": stats.totals.mean(),
        "launch_ms": stats.totals.mean_host(),
        "cycle_ms": stats.totals.cycle_ms,
        "decode_ms": stats.decode.mean(),
        # Sums and counts beside the means: whoever reads twice gets the figures of what lay between.
        "phase_totals": _sums(stats.totals),
        "decode_totals": _sums(stats.decode),
        "kept_length": stats.kept.length,
        "kept_histogram": list(stats.kept.counts),
        "kept_by_position": stats.kept.by_position(),
        "tokens_past_end": stats.tokens_past_end,
        "alarm": stats.alarm.active,
        "alarms": stats.alarm.raised,
        "fallbacks": fallbacks.snapshot(),
        "counters": counters.snapshot(),
        "graph_replays": dict(stats.graphs.replays),
        "eager_passes": dict(stats.graphs.eager),
        "graph_capture_s": graph_capture(scheduler),
        "kv_plans": paths.kv_plans(scheduler),
        "all_reduce": paths.all_reduce(scheduler),
        "ranks": rank_records(scheduler),
        "fork": {
            "version": state.version,
            "base": state.base,
            "topics": {t.name: t.state for t in state.topics},
        },
    }


def _sums(totals: PhaseTotals) -> dict[str, list[float]]:
    return {name: [totals.ms[name], count] for name, count in totals.counts.items()}


def graph_capture(scheduler: Any) -> dict[str, float]:
    """Seconds that capturing each kind of graph took, as upstream's workers report it."""
    found: dict[str, float] = {}
    for worker in (getattr(scheduler, "tp_worker", None), getattr(scheduler, "draft_worker", None)):
        usage = getattr(worker, "graph_time_usage", None)
        if isinstance(usage, dict):
            found.update({str(kind): round(float(spent), 3) for kind, spent in usage.items() if spent > 0})
    return found


def publish(stats: Collector, window: Window, verdict: Verdict | None, labels: dict[str, str]) -> None:
    """Send the window and the totals to Prometheus."""
    metrics.publisher(labels).publish(
        window=window,
        verdict=verdict,
        alarm=stats.alarm,
        fallbacks=fallbacks.snapshot(),
        counts=_counts(stats),
        tokens_past_end=stats.tokens_past_end,
    )


def _counts(stats: Collector) -> dict[str, float]:
    """The fork's counters and the graph counts, under the names that metrics are made from."""
    counts = dict(counters.snapshot())
    for name, count in stats.graphs.replays.items():
        counts[f'graph_replays{{pass="{name}"}}'] = count
    for name, count in stats.graphs.eager.items():
        counts[f'eager_passes{{pass="{name}"}}'] = count
    return counts


def write_baseline(stats: Collector) -> None:
    """Keep the baseline file up to date, from a server that does not speculate."""
    path = os.environ.get(baselines.VARIABLE, "")
    if path and stats.decode.cycles and not stats.kept.cycles:
        with contextlib.suppress(OSError):
            stats.baseline.save(path)


def chat_metadata(metadata: Any, answers: Any) -> Any:
    """The speculative fields of the first choice, added to a chat answer's ``metadata``.

    Upstream gives them to ``/generate`` only, so that acceptance on real conversations stays invisible.
    """
    try:
        info = answers[0]["meta_info"]
    except (IndexError, KeyError, TypeError):
        return metadata
    fields = {name: value for name, value in info.items() if str(name).startswith("spec_")}
    return {**(metadata or {}), **fields} if fields else metadata
