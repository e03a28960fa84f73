"""Summaries of many answers: one row a server, and the verdict between servers."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.bench_verify.rows import Metric, Row, Scalar
from sglang.bench_verify.verdict import PHASES
from sglang.srt.speculative.stats.breakeven import BreakEvenError, judge


def summarise(rows: Sequence[Row], bench: str, startups: dict[str, list[float]] | None = None) -> list[Row]:
    """One row a server: tokens over seconds, kept tokens over verifies, mean phases.

    Rates are weighted by what they are rates of: the mean of five tok/s figures is not the tok/s of five
    runs, and the mean of five accept lengths is not the accept length.
    """
    found: list[Row] = []
    for server in dict.fromkeys(str(row.case.get("server")) for row in rows):
        group = [row for row in rows if row.case.get("server") == server]
        tokens = sum(row.metrics["completion_tokens"].value for row in group)
        seconds = sum(row.metrics["seconds"].value for row in group)
        width = group[0].case.get("draft_tokens")
        metrics = {
            "tok_s": Metric(tokens / seconds, "tok/s", tuple(row.metrics["tok_s"].value for row in group)),
            "completion_tokens": Metric(tokens, "tokens"),
            "seconds": Metric(seconds, "s"),
        }
        kept = [row for row in group if "kept_length" in row.metrics]
        if kept:
            metrics["accept_length"] = Metric(_kept(kept), "tokens")
        phases = _mean_phases(group)
        if phases and width:
            metrics["cycle_ms"] = Metric(sum(phases.get(name, 0.0) for name in PHASES), "ms")
        elif phases:
            metrics["decode_ms"] = Metric(sum(phases.values()), "ms")
        starts = (startups or {}).get(server)
        if starts:
            metrics["startup_s"] = Metric.of(starts, "s")
        case: dict[str, Scalar] = {"server": server, "answers": len(group), "batch": 1, "draft_tokens": width}
        found.append(
            Row(
                bench=bench,
                machine=group[0].machine,
                variant=group[0].variant,
                case=case,
                metrics=metrics,
                phases_ms=phases,
                topics_off=group[0].topics_off,
                environment=group[0].environment,
                started=group[0].started,
                note=_notes(group),
            )
        )
    return found


def server_verdicts(summaries: Sequence[Row]) -> list[str]:
    """One line a speculating server: the cycle's break-even, and the measured speed against the baseline."""
    baseline = next((row for row in summaries if not row.case.get("draft_tokens")), None)
    lines = []
    for row in summaries:
        if not row.case.get("draft_tokens"):
            continue
        name = row.case["server"]
        cycle, kept = row.metrics.get("cycle_ms"), row.metrics.get("accept_length")
        decode = baseline.metrics.get("decode_ms") if baseline is not None else None
        if cycle is not None and kept is not None and decode is not None:
            try:
                lines.append(f"{name}: {judge(cycle.value, decode.value, kept.value).text()}")
            except BreakEvenError as error:
                lines.append(f"{name}: no break-even ({error})")
        elif cycle is not None and kept is not None:
            turn = cycle.value / kept.value
            lines.append(
                f"{name}: cycle {cycle.value:.2f} ms keeps {kept.value:.2f}: wins where a decode takes more than {turn:.2f} ms"
            )
        if baseline is not None:
            ratio = row.metrics["tok_s"].value / baseline.metrics["tok_s"].value
            word = "faster" if ratio > 1 else "slower"
            lines.append(
                f"{name}: {row.metrics['tok_s'].value:.1f} tok/s against {baseline.metrics['tok_s'].value:.1f} "
                f"without speculation: {ratio:.2f}x, {word}"
            )
        if row.phases_ms:
            total = sum(row.phases_ms.get(phase, 0.0) for phase in PHASES)
            parts = ", ".join(
                f"{phase.replace('_', ' ')} {100 * row.phases_ms[phase] / total:.0f}%"
                for phase in PHASES
                if phase in row.phases_ms and total > 0
            )
            lines.append(f"{name}: a cycle is {parts}")
    return lines


def _kept(rows: Sequence[Row]) -> float:
    """Accept length over answers: tokens after the first of each, over the verifies that gave them."""
    tokens = verifies = 0.0
    for row in rows:
        given = row.metrics["completion_tokens"].value - 1.0
        tokens += given
        verifies += given / row.metrics["kept_length"].value
    return tokens / verifies if verifies else 1.0


def _mean_phases(rows: Sequence[Row]) -> dict[str, float]:
    """Phase means weighted by the cycles of each answer."""
    weights = [
        (row, (row.metrics["completion_tokens"].value - 1.0) / max(1.0, _metric(row, "kept_length", 1.0)))
        for row in rows
        if row.phases_ms
    ]
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row, _ in weights for name in row.phases_ms):
        having = [(row, weight) for row, weight in weights if name in row.phases_ms and weight > 0]
        total = sum(weight for _, weight in having)
        if total:
            found[name] = sum(row.phases_ms[name] * weight for row, weight in having) / total
    return found


def _metric(row: Row, name: str, default: float) -> float:
    return row.metrics[name].value if name in row.metrics else default


def _notes(rows: Sequence[Row]) -> str:
    flagged = [row for row in rows if "degenerate" in row.note]
    text = f"{len(flagged)} of {len(rows)} answers are degenerate" if flagged else ""
    broken = [row for row in rows if "histogram" in row.note or "completion tokens, but" in row.note]
    if broken:
        text += ("; " if text else "") + f"{len(broken)} answers violate the acceptance identities"
    return text
