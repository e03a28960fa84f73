"""How much memory a set of graphs needs, estimated before it is captured.

Four parts: what the attention backend allocates once for the largest batch; the static buffers and the shared
logits; the working memory of the largest graph (smaller ones use the same pool again); and for each graph its nodes
and the outputs that it keeps. It is an estimate: the log line after a capture shows it beside what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.speculative.graph_policy.sizes import KindPlan

MIB = 1 << 20
# Memory of one graph by layer: kernel nodes and their parameters. An estimate: no capture has run alone on a GPU yet.
GRAPH_BYTES_PER_LAYER = 160 << 10
GRAPH_BYTES = 1 << 20
# Activations alive at once, in rows of the hidden size. An absorbed MLA layer holds queries of 64 heads beside them.
LIVE_HIDDEN_ROWS = 16
CACHE_SLACK_BYTES = 32 * MIB


@dataclass(frozen=True)
class ModelFacts:
    """What the size of a graph follows from.

    Attributes:
        hidden: hidden size.
        vocabulary: columns of the logits.
        layers: layers that run in the graph.
        dtype_bytes: bytes of an activation.
        kept_hidden: hidden states a row that the graph returns, in units of ``hidden`` (3 for EAGLE-3's auxiliary
            layers, 1 for a draft, 0 for none).
        attention_row_bytes: attention workspace of one row of the largest batch.
    """

    hidden: int
    vocabulary: int
    layers: int
    dtype_bytes: int = 2
    kept_hidden: int = 0
    attention_row_bytes: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes of one kind of graph, by part."""

    kind: str
    attention: int
    buffers: int
    working: int
    graphs: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.attention + self.buffers + self.working + self.graphs

    def text(self) -> str:
        """``0.62 GB (attention 0.50, buffers 0.02, working 0.04, graphs 0.06)``."""
        parts = ", ".join(
            f"{name} {getattr(self, name) / 1e9:.2f}"
            for name in ("attention", "buffers", "working", "graphs")
        )
        return f"{self.total / 1e9:.2f} GB ({parts})"


def estimate(plan: KindPlan, model: ModelFacts) -> Estimate:
    """Bytes that capturing ``plan`` takes."""
    rows = plan.largest_rows
    kept = model.kept_hidden * model.hidden * model.dtype_bytes
    logits = model.vocabulary * 4
    graphs = sum(
        GRAPH_BYTES + model.layers * GRAPH_BYTES_PER_LAYER + size_rows * kept for size_rows in plan.rows
    )
    return Estimate(
        kind=plan.kind,
        attention=rows * model.attention_row_bytes,
        buffers=rows * (logits + kept + 64),
        working=rows * (LIVE_HIDDEN_ROWS * model.hidden * model.dtype_bytes + logits)
        + (CACHE_SLACK_BYTES if rows else 0),
        graphs=graphs,
    )


@dataclass(frozen=True)
class Room:
    """An estimate held against the free memory, of which ``reserved`` bytes are spoken for."""

    estimate: Estimate
    free: int
    reserved: int = 0

    @property
    def fits(self) -> bool:
        """Whether the estimate fits."""
        return self.estimate.total + self.reserved <= self.free

    def text(self) -> str:
        """One sentence, with the flags where it does not fit."""
        need, free = self.estimate.text(), f"{self.free / 1e9:.2f} GB"
        if self.fits:
            return f"graphs of {self.estimate.kind} need about {need}, {free} are free"
        beside = f" beside {self.reserved / 1e9:.2f} GB for other parts" if self.reserved else ""
        return f"graphs of {self.estimate.kind} need about {need}{beside}, only {free} are free; {REMEDY}"


REMEDY = (
    "lower --mem-fraction-static, --cuda-graph-max-bs-decode, --max-running-requests or "
    "--speculative-num-draft-tokens"
)
