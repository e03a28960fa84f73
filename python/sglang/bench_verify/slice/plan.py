"""What a slice run measures, and the rows it gives."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.bench_verify.rows import Metric, Row, Scalar
from sglang.bench_verify.slice.engines import Engine, EngineSpec, Fleet, SliceOptions, stock_topics
from sglang.bench_verify.slice.shapes import Shape
from sglang.bench_verify.slice.union import expected_union
from sglang.bench_verify.soundness import PHASES, doubts

Report = Callable[[str, int, int], None]
Keep = Callable[[Row], None]


@dataclass(frozen=True)
class SlicePlan:
    """Cases of a run.

    Attributes:
        contexts: prompt lengths in tokens.
        batches: requests at once.
        steps: draft steps, 0 = plain decode.
        variants: ``fork``, ``upstream``.
        rounds: measurements of each case; every other round runs in reverse order.
        tokens: generated tokens a measurement.
        seconds: time limit of the measurements; cases that no longer fit are left out and named.
        most_tokens: contexts times batch at most; larger cases are left out (0: no limit). What an engine can hold
            is the largest case, so that many engines share a GPU only if no case is large.
    """

    contexts: tuple[int, ...] = (1024, 16384, 65536)
    batches: tuple[int, ...] = (1,)
    steps: tuple[int, ...] = (0, 2)
    variants: tuple[str, ...] = ("upstream", "fork")
    rounds: int = 3
    tokens: int = 128
    seconds: float = 3600.0
    most_tokens: int = 0

    def cases(self) -> list[tuple[int, int]]:
        """Pairs of context and batch, smallest batch first."""
        pairs = [(context, batch) for batch in self.batches for context in self.contexts]
        return [pair for pair in pairs if not self.most_tokens or pair[0] * pair[1] <= self.most_tokens]


def specs(plan: SlicePlan, accept_length: float | None, upstream_package: str = "") -> list[EngineSpec]:
    """One engine a variant and draft length.

    Stock behaviour comes from a clean upstream package when one is given, else from our topics off.
    """
    found = []
    for variant in plan.variants:
        for steps in plan.steps:
            name = f"{variant}-{'decode' if steps == 0 else f'spec{steps + 1}'}"
            off: tuple[str, ...] = ()
            package = ""
            if variant == "upstream":
                package = upstream_package
                off = () if package else stock_topics()
            found.append(
                EngineSpec(name, steps, variant, topics_off=off, accept_length=accept_length, package=package)
            )
    return found


def pool_tokens(plan: SlicePlan) -> int:
    """KV pool that holds the largest case, with room for what is generated."""
    return max(context * batch for context, batch in plan.cases()) + max(plan.batches) * (plan.tokens + 1024)


def run(
    fleet: Fleet,
    plan: SlicePlan,
    machine: str,
    report: Report | None = None,
    keep: Keep | None = None,
) -> list[Row]:
    """Measure every case of the plan; one row a case and engine. ``keep`` gets each row as soon as it is there."""
    cases = plan.cases()
    deadline = time.monotonic() + plan.seconds
    rows: list[Row] = []
    for index, (context, batch) in enumerate(cases):
        if report is not None:
            report(f"context {context}, batch {batch}", index, len(cases))
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        for name, figures in fleet.in_turn(context, batch, plan.tokens, plan.rounds, deadline).items():
            if figures:
                rows.append(
                    row(fleet, fleet.engines[name], figures, context, batch, plan.tokens, machine, started)
                )
                if keep is not None:
                    keep(rows[-1])
            else:
                fleet.failures.setdefault(f"{name} at {context}", "left out: the time limit was reached")
    if report is not None:
        report("done", len(cases), len(cases))
    return rows


def row(
    fleet: Fleet,
    engine: Engine,
    figures: Sequence[dict[str, Any]],
    context: int,
    batch: int,
    tokens: int,
    machine: str,
    started: str,
) -> Row:
    """The row of one case of one engine."""
    spec, shape, options = engine.spec, fleet.shape, fleet.options
    metrics = {"startup_s": Metric(engine.startup_s, "s")}
    phases: dict[str, float] = {}
    if spec.steps:
        metrics["cycle_ms"] = Metric.of([item["ms_per_cycle"] for item in figures], "ms")
        metrics["token_ms"] = Metric.of([item["ms_per_token"] for item in figures], "ms")
        phases = _median_phases(figures)
        for name in ("verify", "draft", "draft_extend", "sample", "host_gap"):
            if name in phases:
                metrics[f"{name}_ms"] = Metric(phases[name], "ms")
        kept = [item["kept_length"] for item in figures if item["kept_length"] is not None]
        if kept:
            metrics["kept_length"] = Metric.of(kept, "tokens")
    else:
        metrics["decode_ms"] = Metric.of([item["ms_per_token"] for item in figures], "ms")
    # Counted in eager passes of this very number of rows; the figure of a smaller pass would be told for a batch.
    passed = max(1, spec.draft_tokens) * batch
    counted = engine.experts_per_layer(passed)
    expected = expected_union(shape.experts, shape.experts_per_token, passed)
    counters: dict[str, Scalar] = {"expected_experts_per_layer": round(expected, 2)}
    if counted is not None:
        metrics["experts_per_layer"] = Metric(counted, "count")
    if phases:
        wall = metrics["cycle_ms"].value
        counters["phases_over_wall"] = round(sum(phases.get(name, 0.0) for name in PHASES) / wall, 4)
    found = Row(
        bench="slice",
        machine=machine,
        variant=spec.variant,
        case=_case(shape, spec, options, context, batch, tokens),
        metrics=metrics,
        phases_ms=phases,
        counters=counters,
        topics_off=spec.topics_off,
        started=started,
    )
    return dataclasses.replace(found, note="; ".join(doubts(found)))


def _case(
    shape: Shape, spec: EngineSpec, options: SliceOptions, context: int, batch: int, tokens: int
) -> dict[str, Scalar]:
    case: dict[str, Scalar] = {
        "model": shape.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "context": context,
        "batch": batch,
        "draft_tokens": spec.draft_tokens,
        "backend": options.backend,
        "dtype": options.dtype,
        "router": "random" if options.random_router else "dummy",
        "tokens": tokens,
    }
    if spec.steps:
        case["accept_length"] = spec.accept_length
    if options.ranks > 1:
        case["ranks"] = options.ranks
    for name, value in options.arguments:
        case[name] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return case


def _median_phases(figures: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = {name for item in figures for name in item["phases"] if name != "cycle"}
    medians = {}
    for name in sorted(names):
        values = [item["phases"][name] for item in figures if name in item["phases"]]
        medians[name] = round(Metric.of(values, "ms").value, 4)
    return medians
