"""Summaries of many answers: one row a server, and the verdict between servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang.bench_verify.rows import Metric, Row, Scalar
from sglang.bench_verify.soundness import PHASES
from sglang.srt.speculative.stats.breakeven import BreakEvenError, judge


def summarise(
    rows: Sequence[Row], bench: str, startups: Mapping[str, Sequence[float]] | None = None
) -> list[Row]:
    """One row a server: tokens over seconds, kept tokens over verifies, mean phases.

    Rates are weighted by what they are rates of: the mean of five tok/s figures is not the tok/s of five
    runs, and the mean of five accept lengths is not the accept length.
    """
    found: list[Row] = []
    for server in dict.fromkeys(str(row.case.get("server")) for row in rows):
        group = [row for row in rows if row.case.get("server") == server]
        tokens, seconds = _total(group, "completion_tokens"), _total(group, "seconds")
        width = group[0].case.get("draft_tokens")
        # The repeats of a total are its starts; answers to different prompts are not repeats of each other.
        starts = [
            [row for row in group if row.case.get("start") == start]
            for start in dict.fromkeys(row.case.get("start") for row in group)
        ]
        samples = tuple(_total(part, "completion_tokens") / _total(part, "seconds") for part in starts)
        metrics = {
            "tok_s": Metric(tokens / seconds, "tok/s", samples if len(starts) > 1 else ()),
            "completion_tokens": Metric(tokens, "tokens"),
            "seconds": Metric(seconds, "s"),
        }
        kept = [row for row in group if "kept_length" in row.metrics]
        if kept:
            metrics["accept_length"] = Metric(_kept(kept), "tokens")
        known = [row.metrics["known_decode_ms"].value for row in group if "known_decode_ms" in row.metrics]
        if known:
            metrics["known_decode_ms"] = Metric.of(known, "ms")
        phases = _mean_phases(group)
        if phases and width:
            metrics["cycle_ms"] = Metric(sum(phases.get(name, 0.0) for name in PHASES), "ms")
        elif phases:
            metrics["decode_ms"] = Metric(sum(phases.values()), "ms")
        ups = (startups or {}).get(server)
        if ups:
            metrics["startup_s"] = Metric.of(ups, "s")
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
        # Without a baseline of this run: what the server keeps of one that was measured (SGLANG_SPEC_BASELINE).
        decode = row.metrics.get("known_decode_ms") if baseline is None else baseline.metrics.get("decode_ms")
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


def best_length(summaries: Sequence[Row]) -> str:
    """Which draft length gave the most tokens a second, where several were served; empty otherwise."""
    lengths = {int(str(row.case["draft_tokens"])) for row in summaries if row.case.get("draft_tokens")}
    if len(lengths) < 2:
        return ""
    ranked = sorted(summaries, key=lambda row: -row.metrics["tok_s"].value)
    shown = ", ".join(f"{_drafts(row)}: {row.metrics['tok_s'].value:.1f}" for row in ranked)
    return f"best number of draft tokens here: {_drafts(ranked[0])} (tok/s by draft tokens: {shown})"


def _drafts(row: Row) -> str:
    width = int(str(row.case.get("draft_tokens") or 0))
    return str(max(0, width - 1)) + (" (upstream)" if row.variant == "upstream" else "")


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.metrics[name].value for row in rows)


def _verifies(row: Row) -> float:
    """Verifies of an answer: counted, or from its tokens after the first in rows that hold no count."""
    counted = row.counters.get("verifies")
    if isinstance(counted, (int, float)):
        return float(counted)
    return (row.metrics["completion_tokens"].value - 1.0) / row.metrics["kept_length"].value


def _kept(rows: Sequence[Row]) -> float:
    """Accept length over answers: tokens that their verifies gave, over the verifies."""
    verifies = sum(_verifies(row) for row in rows)
    tokens = sum(_verifies(row) * row.metrics["kept_length"].value for row in rows)
    return tokens / verifies if verifies else 1.0


def _mean_phases(rows: Sequence[Row]) -> dict[str, float]:
    """Phase means weighted by the cycles of each answer."""
    weights = [
        (
            row,
            _verifies(row) if "kept_length" in row.metrics else row.metrics["completion_tokens"].value - 1.0,
        )
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


def _notes(rows: Sequence[Row]) -> str:
    flagged = [row for row in rows if "degenerate" in row.note]
    text = f"{len(flagged)} of {len(rows)} answers are degenerate" if flagged else ""
    broken = [row for row in rows if "histogram" in row.note or "completion tokens, but" in row.note]
    if broken:
        text += ("; " if text else "") + f"{len(broken)} answers violate the acceptance identities"
    return text
