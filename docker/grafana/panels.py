"""The dashboard of the verify metrics, as data: ``python docker/grafana/panels.py`` writes dashboards/verification.json.

A panel is a title, a description, a unit and its queries; a query is an expression and the legend of its series.
Metric names are those of docs/metrics.md and of upstream; a test holds every one of them to the code.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "dashboards" / "verification.json"
COLUMNS = 24
HEIGHT = 8
MODEL = '{model_name=~"$model"}'


@dataclass(frozen=True)
class Panel:
    """One panel; ``kind`` is a Grafana panel type, ``unit`` a Grafana unit, ``stacked`` piles its series up."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


def rate(metric: str, *by: str, window: str = "$__rate_interval") -> str:
    """Increase a second of a counter, summed over everything but the labels ``by``."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} (rate(sglang:{metric}{MODEL}[{window}]))"


def gauge(metric: str) -> str:
    """A gauge; of several schedulers the mean."""
    return f"avg(sglang:{metric}{MODEL})"


PANELS = (
    Panel(
        "Speed-up of speculation",
        "Tokens a second with speculation over without, from a measured baseline (SGLANG_SPEC_BASELINE). Below 1 "
        "plain decoding is faster.",
        "none",
        ((gauge("spec_speedup_ratio"), "speed-up"),),
        kind="stat",
        width=6,
    ),
    Panel(
        "Acceptance alarm",
        "1 while the draft accepts almost nothing or acceptance has collapsed.",
        "none",
        ((f"max(sglang:spec_acceptance_alarm{MODEL})", "alarm"),),
        kind="stat",
        width=6,
    ),
    Panel(
        "Accept length kept and needed",
        "Tokens a verify keeps, bonus included, and the accept length at which a cycle breaks even.",
        "none",
        ((gauge("spec_kept_length"), "kept"), (gauge("spec_break_even_length"), "needed")),
        width=12,
    ),
    Panel(
        "Cycle by phase",
        "Device time of each phase; they sum to the cycle.",
        "ms",
        ((f"avg by (phase) (sglang:spec_phase_ms{MODEL})", "{{phase}}"),),
        width=12,
        stacked=True,
    ),
    Panel(
        "Cycle and plain decode",
        "One speculative cycle, and one plain decode from the baseline.",
        "ms",
        ((gauge("spec_cycle_ms"), "cycle"), (gauge("spec_decode_ms"), "decode")),
        width=12,
    ),
    Panel(
        "Drafts kept by position",
        "Share of verifies that kept draft 1, 2, ...",
        "percentunit",
        (
            (
                f"{rate('spec_kept_drafts_total', 'position')} / on () group_left () {rate('spec_cycles_total')}",
                "draft {{position}}",
            ),
        ),
    ),
    Panel(
        "Graph replays",
        "Passes that replayed a CUDA graph, a second.",
        "ops",
        ((rate("spec_graph_replays_total", "pass"), "{{pass}}"),),
    ),
    Panel(
        "Eager passes",
        "Passes that ran outside a graph, a second; the reason is a fallback named `cuda graph of PASS`.",
        "ops",
        ((rate("spec_eager_passes_total", "pass"), "{{pass}}"),),
    ),
    Panel(
        "Verify steps by graph",
        "Verify steps a second that replayed their graph, and those that did not, by reason.",
        "ops",
        ((rate("spec_verify_graph_steps_total", "kind", "reason"), "{{kind}}: {{reason}}"),),
    ),
    Panel(
        "Speculative or plain",
        "Steps a second by what the automatic choice made them, and its switches.",
        "ops",
        (
            (rate("spec_auto_steps_total", "mode"), "{{mode}}"),
            (rate("spec_auto_switches_total", "to"), "switch to {{to}}"),
        ),
    ),
    Panel(
        "Fallbacks by path and reason",
        "Times a fast path handed over to the stock path, a second.",
        "ops",
        ((rate("spec_fallbacks_total", "path", "reason"), "{{path}}: {{reason}}"),),
        width=12,
    ),
    Panel(
        "Tokens behind the end",
        "Accepted tokens behind the end of a request, a second: work of a verify that nobody reads. Cut where a run is "
        "resolved, or, with the topic run-end off, only counted.",
        "ops",
        (
            (rate("spec_run_tokens_behind_end_total"), "cut"),
            (rate("spec_tokens_past_end_total"), "counted"),
        ),
    ),
    Panel(
        "Tokens a second", "Upstream's gauge.", "none", ((f"sum(sglang:gen_throughput{MODEL})", "tokens/s"),)
    ),
    Panel(
        "Requests",
        "Running and waiting requests.",
        "none",
        (
            (f"sum(sglang:num_running_reqs{MODEL})", "running"),
            (f"sum(sglang:num_queue_reqs{MODEL})", "waiting"),
        ),
    ),
    Panel(
        "Use of the KV cache",
        "Share of the cache's tokens in use.",
        "percentunit",
        ((f"max(sglang:token_usage{MODEL})", "used"),),
    ),
    Panel(
        "Time between tokens",
        "Median and 99th percentile over streamed pieces.",
        "s",
        tuple(
            (
                f"histogram_quantile({quantile}, {rate('inter_token_latency_seconds_bucket', 'le')})",
                f"p{round(100 * quantile)}",
            )
            for quantile in (0.5, 0.99)
        ),
        width=12,
    ),
    Panel(
        "Time to the first token",
        "Median and 99th percentile.",
        "s",
        tuple(
            (
                f"histogram_quantile({quantile}, {rate('time_to_first_token_seconds_bucket', 'le')})",
                f"p{round(100 * quantile)}",
            )
            for quantile in (0.5, 0.99)
        ),
        width=12,
    ),
)


def layout(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Panels in rows of 24 columns, in the order given."""
    made: list[dict[str, Any]] = []
    column = row = 0
    for number, panel in enumerate(panels, 1):
        if column + panel.width > COLUMNS:
            column, row = 0, row + HEIGHT
        custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
        made.append(
            {
                "id": number,
                "type": panel.kind,
                "title": panel.title,
                "description": panel.about,
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"x": column, "y": row, "w": panel.width, "h": HEIGHT},
                "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
                    for index, (expression, legend) in enumerate(panel.queries)
                ],
            }
        )
        column += panel.width
    return made


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    variable = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": {"query": "label_values(sglang:num_running_reqs, model_name)", "refId": "model"},
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "uid": "fast-verify",
        "title": "Verification",
        "tags": ["sglang", "speculative decoding"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": layout(PANELS),
    }


def text() -> str:
    """The dashboard as it is committed."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
    print(OUT, file=sys.stderr)
