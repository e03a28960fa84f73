"""``benchmark/results/headline.json``: the flat map of figures that README and docs quote.

Generated from rows by rules, never typed. Each entry names the raw file and the row's index, so a
figure in the README can be followed to its samples, its command and its machine. A rule is data: the
bench, the metric and the case it reads, and the name it publishes. Where several rows match, the one
measured last wins, so a figure cannot outlive the run that replaced it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.bench_verify.rows import Results, Row, Scalar, context_label, is_results_file

DEFAULT_DIRECTORY = "benchmark/results"


@dataclass(frozen=True)
class Rule:
    """Publish ``metric`` of matching rows as ``name``.

    Attributes:
        name: template; ``{machine}`` is the row's machine, ``{context}`` its context label, any other
            ``{key}`` the row's case entry of that name.
        bench: the rows' bench.
        metric: the metric published, or the numerator where ``over`` is given.
        where: case entries that must be equal.
        unless: case entries of which none may be equal.
        together: a file that holds both variants goes before a later one of the fork alone, because the
            tables that quote these figures compare within one run.
        over: case entries of the row that the figure is divided by (same variant, same other entries).
        over_metric: metric of that row; default is ``metric``.
        lower_is_better: whether ratio = upstream / fork (times) or fork / upstream (rates).
    """

    name: str
    bench: str
    metric: str
    where: Mapping[str, Scalar] = field(default_factory=dict)
    over: Mapping[str, Scalar] | None = None
    over_metric: str = ""
    lower_is_better: bool = True
    unless: Mapping[str, Scalar] = field(default_factory=dict)
    together: bool = False


# In the name of an engine that runs with a setting of its own.
WITH_SETTING = "-with-"
# Every draft length at several batches: engines of their own, compared among themselves only.
DRAFT_LENGTHS = {"series": "draft-lengths"}
# A slice with noise for router logits reads the experts of three tokens in a verify, one without those of one:
# two series of figures, never mixed in one row of a table.
RANDOM_ROUTER = {"router": "random"}


def _slice_rules(series: str, where: Mapping[str, Scalar], unless: Mapping[str, Scalar]) -> tuple[Rule, ...]:
    decode = {"batch": 1, "draft_tokens": 0, **where}
    cycle = {"batch": 1, "draft_tokens": 3, **where}
    prefix = "{machine}." + series
    return (
        Rule(prefix + ".decode_ms.{context}", "slice", "decode_ms", decode, unless=unless, together=True),
        Rule(prefix + ".cycle_ms.{context}", "slice", "cycle_ms", cycle, unless=unless, together=True),
        Rule(
            prefix + ".cycle_over_decode.{context}",
            "slice",
            "cycle_ms",
            cycle,
            over={"draft_tokens": 0},
            over_metric="decode_ms",
            unless=unless,
            together=True,
        ),
        Rule(prefix + ".verify_ms.{context}", "slice", "verify_ms", cycle, unless=unless, together=True),
    )


RULES = (
    *_slice_rules("slice", {}, {**RANDOM_ROUTER, **DRAFT_LENGTHS}),
    *_slice_rules("slice_random_router", RANDOM_ROUTER, DRAFT_LENGTHS),
    Rule("{machine}.draft_length.decode_ms.{context}.b{batch}", "slice", "decode_ms", DRAFT_LENGTHS),
    Rule(
        "{machine}.draft_length.cycle_ms.{context}.b{batch}.d{draft_tokens}",
        "slice",
        "cycle_ms",
        DRAFT_LENGTHS,
    ),
    Rule("{machine}.nonfinite.device_us.{work}.b{batch}", "nonfinite_cost", "device_us"),
    Rule("{machine}.nonfinite.host_us.{work}.b{batch}", "nonfinite_cost", "host_us"),
    Rule(
        "{machine}.slice.launches_outside_graphs",
        "profile",
        "launches_outside_graphs",
        {"draft_tokens": 3},
        together=True,
    ),
    Rule("{machine}.slice.syncs", "profile", "syncs", {"draft_tokens": 3}, together=True),
    Rule(
        "{machine}.slice.experts_per_layer.verify3",
        "slice",
        "experts_per_layer",
        {"batch": 1, "draft_tokens": 3},
        unless=DRAFT_LENGTHS,
    ),
    Rule("{machine}.mla_verify_us.{context}", "attention", "mla_verify_us", {"batch": 1, "tokens": 3}),
    Rule("{machine}.mla_decode_us.{context}", "attention", "mla_verify_us", {"batch": 1, "tokens": 1}),
    Rule(
        "{machine}.mla_verify3_over_decode1.{context}",
        "attention",
        "mla_verify_us",
        {"batch": 1, "tokens": 3},
        over={"tokens": 1},
    ),
    Rule("{machine}.all_reduce_norm_us.{shape}", "all_reduce", "all_reduce_norm_us"),
    Rule("{machine}.demo.accept_length", "demo_summary", "accept_length", lower_is_better=False),
    Rule("{machine}.demo.startup_s", "demo_summary", "startup_s", {"draft_tokens": 3}),
    Rule("{machine}.demo.tok_s", "demo_summary", "tok_s", {"draft_tokens": 3}, lower_is_better=False),
    Rule(
        "{machine}.demo.baseline_tok_s", "demo_summary", "tok_s", {"draft_tokens": 0}, lower_is_better=False
    ),
    Rule(
        "{machine}.bench_demo.accept_length.d{draft_tokens}",
        "bench_demo_summary",
        "accept_length",
        lower_is_better=False,
    ),
    Rule("{machine}.auto.token_ms.{context}.b{batch}.{engine}", "speculative_auto", "token_ms"),
    Rule(
        "{machine}.auto.over_plain_decode.{context}.b{batch}.{engine}",
        "speculative_auto",
        "over_plain_decode",
    ),
    Rule("{machine}.stats.overhead_percent.{context}", "stats_cost", "overhead_percent"),
    Rule("{machine}.stats.overhead_us.{context}", "stats_cost", "overhead_us"),
)


@dataclass(frozen=True)
class Source:
    """A row with the file and index it came from."""

    file: str
    index: int
    row: Row
    taken: str

    @property
    def when(self) -> str:
        """Time of the measurement as sortable text."""
        return self.row.started or self.taken


def collect(directory: str | Path = DEFAULT_DIRECTORY) -> list[Source]:
    """Every row of every results file of a directory, oldest first."""
    found: list[Source] = []
    for path in sorted(Path(directory).glob("*.json")):
        if not is_results_file(path):
            continue
        results = Results.load(path)
        for index, row in enumerate(results.rows):
            found.append(Source(path.name, index, row, results.environments[row.environment].taken))
    return sorted(found, key=lambda source: (source.when, source.file, source.index))


def build(sources: Iterable[Source], rules: Iterable[Rule] = RULES) -> dict[str, dict[str, Any]]:
    """The headline map: name -> {value, unit, upstream, ratio, row}.

    ``upstream`` is the figure of stock behaviour for the same name, or None where it was not measured.
    """
    rows = list(sources)
    headline: dict[str, dict[str, Any]] = {}
    for rule in rules:
        for name, by_variant in _figures(rule, rows).items():
            fork, upstream = by_variant.get("fork"), by_variant.get("upstream")
            if fork is None:
                continue
            value, unit, source = fork
            other = upstream[0] if upstream else None
            entry: dict[str, Any] = {"value": _round(value), "unit": unit, "upstream": None, "ratio": None}
            if other is not None:
                entry["upstream"] = _round(other)
                numerator, denominator = (other, value) if rule.lower_is_better else (value, other)
                entry["ratio"] = _round(numerator / denominator) if denominator else None
            entry["row"] = f"{source.file}#{source.index}"
            headline[name] = entry
    return dict(sorted(headline.items(), key=lambda item: _natural(item[0])))


def write(directory: str | Path = DEFAULT_DIRECTORY) -> Path:
    """Generate ``headline.json`` of a results directory and return its path."""
    path = Path(directory) / "headline.json"
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(build(collect(directory)), indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path


def load(directory: str | Path = DEFAULT_DIRECTORY) -> dict[str, dict[str, Any]]:
    """The headline map as it lies in the repository; empty when nothing was measured yet."""
    path = Path(directory) / "headline.json"
    if not path.exists():
        return {}
    loaded: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


Figure = tuple[float, str, Source]


def _figures(rule: Rule, rows: list[Source]) -> dict[str, dict[str, Figure]]:
    found: dict[str, list[tuple[str, Figure]]] = {}
    for source in rows:
        row = source.row
        if row.bench != rule.bench or rule.metric not in row.metrics or not _matches(row, rule.where):
            continue
        if rule.unless and any(row.case.get(name) == value for name, value in rule.unless.items()):
            continue
        # The fork with a topic off, or with a setting that is off by default, is neither the fork nor upstream.
        if row.variant == "fork" and (row.topics_off or WITH_SETTING in str(row.case.get("engine", ""))):
            continue
        metric = row.metrics[rule.metric]
        value, unit = metric.value, metric.unit
        # A time that is not positive is a disturbed measurement, whatever its file says.
        if unit in ("ms", "us", "s") and value <= 0:
            continue
        if rule.over is not None:
            base = _denominator(rule, source, rows)
            if base is None or base == 0:
                continue
            value, unit = value / base, "ratio"
        found.setdefault(_name(rule.name, row), []).append((row.variant, (value, unit, source)))
    pick = _last_together if rule.together else dict
    return {name: pick(figures) for name, figures in found.items()}


def _last_together(figures: list[tuple[str, Figure]]) -> dict[str, Figure]:
    """The last figure of each variant, from the last file that holds all variants if there is one."""
    variants = {variant for variant, _ in figures}
    files = [figure[2].file for _, figure in figures]
    for file in reversed(files):
        of_file = {variant: figure for variant, figure in figures if figure[2].file == file}
        if set(of_file) == variants:
            return of_file
    return dict(figures)


def _denominator(rule: Rule, source: Source, rows: list[Source]) -> float | None:
    """The figure that a ratio divides by: same bench, machine, variant, backend and context."""
    over = rule.over or {}
    metric = rule.over_metric or rule.metric
    wanted: dict[str, Scalar] = {**rule.where, **over}
    for name in ("context", "backend", "model", "kv_dtype"):
        if name in source.row.case:
            wanted[name] = source.row.case[name]
    best: float | None = None
    for other in rows:
        row = other.row
        if (row.bench, row.machine, row.variant) != (rule.bench, source.row.machine, source.row.variant):
            continue
        if metric in row.metrics and _matches(row, wanted):
            # The pair that was measured together is the fair one; otherwise the last.
            if other.file == source.file and row.environment == source.row.environment:
                return row.metrics[metric].value
            best = row.metrics[metric].value
    return best


def _matches(row: Row, where: Mapping[str, Scalar]) -> bool:
    return all(row.case.get(name) == value for name, value in where.items())


def _name(template: str, row: Row) -> str:
    values = {name: str(value) for name, value in row.case.items()}
    values["machine"] = row.machine
    values["context"] = context_label(row.case["context"]) if "context" in row.case else "cycle"
    try:
        return template.format(**values)
    except KeyError as error:
        raise KeyError(
            f"headline name {template!r} needs case entry {error} in row {row.label()!r}"
        ) from error


def _round(value: float) -> float:
    """Four significant digits: more would claim a precision no clock here has."""
    return float(f"{value:.4g}")


def _natural(name: str) -> tuple[Any, ...]:
    """Sort 1k before 16k before 128k."""
    head, _, tail = name.rpartition(".")
    if tail.endswith("k") and tail[:-1].isdigit():
        return (head, 1, int(tail[:-1]), tail)
    return (name, 0, 0, "")
