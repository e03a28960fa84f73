"""Benchmark rows: the one format in which every bench of this repository writes its figures.

A file holds the environments it was measured in and the rows, each pointing at its environment by
index. Rows are data, never prose: a figure without its case, its unit and its environment cannot be
compared with another one, and a comparison that cannot be made is how a regression goes unnoticed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.bench_verify.environment import Environment
from sglang.bench_verify.errors import BenchError

SCHEMA = "bench-verify/1"
VARIANTS = ("fork", "upstream")
Scalar = str | int | float | bool | None


class RowError(BenchError):
    """A row or a results file that does not follow the format."""


@dataclass(frozen=True)
class Metric:
    """One figure: ``value`` in ``unit``, and the repeats it was reduced from.

    Attributes:
        value: the reported figure (the median where there are repeats).
        unit: ms, us, s, tok/s, GB/s, tokens, ratio, count, bytes.
        samples: one figure a repeat, in the order measured; empty for a derived figure.
    """

    value: float
    unit: str
    samples: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[float], unit: str) -> Metric:
        """Median of repeats. Raises RowError when there is none."""
        kept = tuple(float(sample) for sample in samples)
        if not kept:
            raise RowError(
                f"a metric in {unit} needs at least one sample; record the failure in Row.note instead"
            )
        return cls(value=statistics.median(kept), unit=unit, samples=kept)

    @property
    def spread(self) -> float:
        """Largest over smallest repeat; 1.0 when there is one repeat or none."""
        if len(self.samples) < 2 or min(self.samples) <= 0:
            return 1.0
        return max(self.samples) / min(self.samples)


@dataclass(frozen=True)
class Row:
    """Figures of one case, measured in one go.

    Attributes:
        bench: the kind of bench (``slice``, ``attention``, ``all_reduce``, ``server``, ``launch``, ``demo``).
        machine: short name of the machine (``h200``, ``h200x2``, ``cpu``).
        variant: ``fork``, or ``upstream`` for stock behaviour (the upstream wheel, or our topics off).
        case: what was measured: ``context`` and ``batch`` in tokens and requests, ``draft_tokens``
            (0 = no speculation), ``backend``, ``graphs``, ``model`` and what else tells cases apart.
        metrics: name -> figure.
        phases_ms: device milliseconds of each phase of a cycle, ``wall`` for the whole cycle.
        counters: counts that explain the figures (graph replays, fallbacks by reason, expert union ...).
        topics_off: topics of the fork that were switched off.
        environment: index into the file's environments.
        started: ISO time at which the measurement started.
        note: what a reader must know; also why a metric is missing.
    """

    bench: str
    machine: str
    variant: str
    case: Mapping[str, Scalar]
    metrics: Mapping[str, Metric]
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, Scalar] = field(default_factory=dict)
    topics_off: tuple[str, ...] = ()
    environment: int = 0
    started: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise RowError(f"variant {self.variant!r} is not one of {', '.join(VARIANTS)}")
        if not self.bench or not self.machine:
            raise RowError(f"a row needs bench and machine, got {self.bench!r} and {self.machine!r}")
        for name, metric in self.metrics.items():
            if metric.value != metric.value:
                raise RowError(f"metric {name} of {self.bench} is NaN; leave it out and say why in note")

    def key(self) -> tuple[Any, ...]:
        """What makes two rows of different files the same case."""
        case = tuple(sorted((name, value) for name, value in self.case.items()))
        return (self.bench, self.machine, self.variant, case)

    def label(self) -> str:
        """Short text for a person: ``slice fork context=64k batch=1``."""
        parts = [self.bench, self.variant]
        for name, value in self.case.items():
            parts.append(f"{name}={context_label(value) if name == 'context' else value}")
        return " ".join(parts)


@dataclass
class Results:
    """The content of one results file."""

    environments: list[Environment] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Append a row; its environment must be in the file already."""
        if not 0 <= row.environment < len(self.environments):
            raise RowError(
                f"row points at environment {row.environment}, the file holds {len(self.environments)}: "
                "append environment.capture() to Results.environments first"
            )
        self.rows.append(row)

    def merge(self, other: Results) -> None:
        """Append another file's rows with their environments."""
        offset = len(self.environments)
        self.environments.extend(other.environments)
        for row in other.rows:
            self.rows.append(dataclasses.replace(row, environment=row.environment + offset))

    def select(self, **wanted: Scalar) -> list[Row]:
        """Rows whose attribute or case entry equals every given value."""
        return [row for row in self.rows if all(_value(row, name) == value for name, value in wanted.items())]

    def save(self, path: str | Path) -> None:
        """Write the file in one step, so that a reader never sees half of it."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(target.name + ".part")
        scratch.write_text(json.dumps(self.to_json(), indent=1, sort_keys=False) + "\n", encoding="utf-8")
        os.replace(scratch, target)

    def to_json(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": SCHEMA,
            "environments": [dataclasses.asdict(environment) for environment in self.environments],
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read a file. Raises RowError naming the file and what is wrong with it."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise RowError(f"{path}: not a results file ({error})") from error
        return cls.from_json(document, str(path))

    @classmethod
    def from_json(cls, document: Any, source: str = "<memory>") -> Results:
        """Build from a parsed document."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise RowError(f"{source}: schema is {found!r}, this version reads {SCHEMA!r}")
        results = cls(environments=[Environment.from_json(item) for item in document["environments"]])
        for index, item in enumerate(document["rows"]):
            try:
                results.add(_row_from_json(item))
            except (KeyError, TypeError, RowError) as error:
                raise RowError(f"{source}: row {index}: {error}") from error
        return results


def is_results_file(path: str | Path) -> bool:
    """Whether a JSON file claims to be in this format (other JSON may lie beside it)."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return isinstance(document, dict) and document.get("schema") == SCHEMA


def context_label(context: Scalar) -> str:
    """Name of a context length in headline names: 1000 and 1024 -> ``1k``, 65536 -> ``64k``, 300 -> ``300``."""
    if not isinstance(context, (int, float)):
        return str(context)
    count = int(context)
    if count < 1000:
        return str(count)
    for unit in (1024, 1000):
        if count % unit == 0:
            return f"{count // unit}k"
    return f"{round(count / 1024)}k"


def _value(row: Row, name: str) -> Any:
    if name in row.case:
        return row.case[name]
    return getattr(row, name, None)


def _row_from_json(item: Mapping[str, Any]) -> Row:
    known = {entry.name for entry in dataclasses.fields(Row)}
    unknown = sorted(set(item) - known)
    if unknown:
        raise RowError(f"unknown fields {', '.join(unknown)}")
    fields = dict(item)
    fields["metrics"] = {
        name: Metric(float(metric["value"]), str(metric["unit"]), tuple(_numbers(metric.get("samples", ()))))
        for name, metric in item["metrics"].items()
    }
    fields["topics_off"] = tuple(item.get("topics_off", ()))
    return Row(**fields)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]
