"""The numbers the model rests on, each with its source.

"slice profile" is the profile of upstream 0.5.17 on the one-rank slice, one H200, batch 1, 1k context: decode 362
kernels and 1.87 ms busy of 1.905 ms; EAGLE-3 cycle 473 kernels, 4.88 ms busy of 6.015 ms.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A value with its unit and where it comes from: ``measured``, ``cited`` or ``assumed``."""

    value: float
    unit: str
    kind: str
    source: str


# --- bandwidth -----------------------------------------------------------------------------------
H200_BANDWIDTH = Constant(
    4.3e12, "B/s", "measured", "device copy on the H200 of the slice (datasheet: 4.8 TB/s)"
)
RTX_BANDWIDTH = Constant(
    1.79e12 * 4.3 / 4.8,
    "B/s",
    "assumed",
    "NVIDIA RTX PRO 6000 Blackwell datasheet, 1,792 GB/s, times the copy efficiency of the H200",
)
DENSE_EFFICIENCY = Constant(
    0.8,
    "ratio",
    "assumed",
    "a weight matrix of 5 to 30 MB read once by a GEMM of few rows; FlashMLA reports 0.9 for long streams",
)
MOE_EFFICIENCY_TRITON = Constant(
    0.95,
    "ratio",
    "measured",
    "slice: 21 distinct experts in place of 8 add 0.32 ms (upstream, 1k) to 0.54 ms (fork, 64k) to a verify, 0.39 so; decode "
    "of 8 layers with 42 in place of 8 adds 0.45 ms",
)
MOE_LATENCY_TRITON_US = Constant(
    14.0,
    "us",
    "measured",
    "slice profile: an expert GEMM of 29 us for 8 experts of 11 MB, less bytes and fixed cost",
)
MOE_EFFICIENCY_MARLIN = Constant(
    0.5,
    "ratio",
    "assumed",
    "INT4 Marlin unpacks in registers what it reads: half the copy bandwidth, and no latency beyond a kernel's",
)

# --- fixed cost of a kernel inside a graph ---------------------------------------------------------
H200_KERNEL_US = Constant(
    1.9,
    "us",
    "measured",
    "slice profile: 1.87 ms of a decode less attention 0.30, expert GEMMs 0.64 and bytes 0.33, over 316 kernels",
)
RTX_KERNEL_US = Constant(
    1.9 * 1980 / 2320,
    "us",
    "assumed",
    "the H200 figure by the ratio of clocks, 1,980 MHz there and 2,320 MHz in the field report",
)
KERNELS_OF_SAMPLING = Constant(
    9, "count", "measured", "slice profile: 362 kernels of a decode less those of its layers"
)

# --- attention of a layer: fixed us, and us for 1,000 tokens of context ------------------------------
# Upstream's split decode is no line in the context: with more tokens it takes more splits, up to its limit, and the time a
# token falls (2.4, 1.2, 0.9 us a 1,000 tokens between these points).
_DECODE_STEP = "slice decode with a dummy router, 1.840, 2.284, 2.972, 3.662 ms, over 12 layers, added to the point before"
H200_DECODE_1K_US = Constant(
    25.2, "us", "measured", "slice profile: split stage 6.2 us and merge 19 us at 1k"
)
H200_DECODE_16K_US = Constant(25.2 + 444 / 12, "us", "measured", _DECODE_STEP)
H200_DECODE_64K_US = Constant(62.2 + 688 / 12, "us", "measured", _DECODE_STEP)
H200_DECODE_128K_US = Constant(119.5 + 690 / 12, "us", "measured", _DECODE_STEP)
H200_SERIAL_FIXED_US = Constant(
    10.0, "us", "measured", "slice profile: 218 us a call at 1.1k, less the slope below"
)
H200_SERIAL_PER_K_US = Constant(
    192.5,
    "us",
    "measured",
    "slice phases, upstream verify 4.484, 39.96, 153.6 ms at 1k, 16k, 64k over 12 layers: 12.3 us a block of 64 keys",
)
RTX_SERIAL_PER_K_US = Constant(
    192.5 * 1980 / 2320,
    "us",
    "assumed",
    "the same time a key: blocks of 32 keys at SM120, half the work each, at the other clock",
)
H200_SPLIT_FIXED_US = Constant(
    10.0,
    "us",
    "measured",
    "sweep of the fork's MLA verify, 3 tokens: 9.8, 12.3, 16.2, 31.6, 50.5 us at 1k, 4k, 16k, 64k, 128k",
)
H200_SPLIT_PER_K_US = Constant(0.32, "us", "measured", "the same sweep: 1.15 MB a 1,000 tokens at 3.6 TB/s")
RTX_SPLIT_PER_K_US = Constant(
    0.32 * 4.8 / 1.79,
    "us",
    "assumed",
    "the H200 slope by the ratio of datasheet bandwidths: 75% of 1,792 GB/s",
)
H200_DRAFT_FIXED_US = Constant(
    20.0, "us", "assumed", "split decode of the draft's 8 heads, as the target's fixed part"
)
H200_DRAFT_PER_K_US = Constant(
    17.7, "us", "measured", "slice phases, upstream draft 0.187, 0.458, 1.328 ms at 1k, 16k, 64k"
)
H200_EXTEND_FIXED_US = Constant(
    10.0, "us", "assumed", "the prefill kernel on the draft's 8 heads, as the target's fixed part"
)
H200_EXTEND_PER_K_US = Constant(
    68.4, "us", "measured", "slice phases, upstream draft extend 0.355, 1.408, 4.764 ms at 1k, 16k, 64k"
)
H200_EXTEND_SPLIT_PER_K_US = Constant(
    0.96,
    "us",
    "measured",
    "slice phases, the fork's draft extend 0.259, 0.275, 0.325, 0.385 ms at 1k to 128k",
)

# --- around the graphs ---------------------------------------------------------------------------------
CYCLE_EAGER_KERNELS = Constant(
    56, "count", "measured", "slice profile: 72 launches outside graphs a cycle, 16 a decode"
)
HOST_CYCLE_US = Constant(
    3100,
    "us",
    "measured",
    "slice: cycle of 3.11 ms with 2.12 ms busy, upstream's scheduler and worker on the host, 3 graphs",
)
HOST_OVER_LAUNCH = Constant(
    1.43,
    "ratio",
    "measured",
    "cycle over launch time of the fork's six slice rows that wait for the host, two machines: 1.41 to 1.51",
)
SAMPLE_US = Constant(
    45, "us", "measured", "slice phases, upstream: accept and sample take 0.044 to 0.045 ms at every context"
)
SAMPLE_FORK_US = Constant(
    58,
    "us",
    "measured",
    "slice phases, the fork with a random router: 0.058 to 0.062 ms; it also looks for NaN, in two launches",
)
SAMPLE_OPERATORS_US = Constant(
    96,
    "us",
    "measured",
    "slice phases, the fork before commit 10fab52, whose look for NaN was 14 small operators: 0.095 to 0.097 ms",
)
SAMPLE_ONE_GRAPH_US = Constant(
    2.7, "us", "measured", "cycle-graph rows: the greedy accept kernel inside the graph, 2.5 to 2.9 us"
)
GLUE_ONE_GRAPH_US = Constant(
    30,
    "us",
    "measured",
    "cycle-graph rows: draft phase of 0.153 ms at 1k less its parts; begin, choices of a token and verify's inputs",
)
GAP_ONE_GRAPH_US = Constant(
    14, "us", "measured", "cycle-graph rows: 13.5 to 14 us between two graphs where the host is ahead"
)
HOST_ONE_GRAPH_US = Constant(
    700, "us", "measured", "cycle-graph rows: 0.33 to 0.68 ms of the host for a step, one launch of a graph"
)
HOST_DECODE_US = Constant(
    1190, "us", "measured", "slice of 8 layers: decode of 1.186 ms; the host is not slower than that"
)
GRAPH_GAP_US = Constant(
    45,
    "us",
    "measured",
    "slice profile: 1.905 ms decode less 1.87 ms busy, and a little more for three graphs",
)

# --- all-reduce: fixed us and us a KB of message, 8 ranks -----------------------------------------------
NCCL_PCIE_FIXED_US = Constant(
    15.0,
    "us",
    "cited",
    "NCCL over PCIe, 24.2 us at 32 KB and 51.8 us at 128 KB (report on a push all-reduce, September 2026)",
)
NCCL_PCIE_PER_KB_US = Constant(0.2875, "us", "cited", "the same two points of that report")
ONE_SHOT_PCIE_FIXED_US = Constant(
    6.8, "us", "cited", "one-shot on 8 PCIe ranks behind switches, 9.2 us at 8 KB and 16.5 us at 32 KB"
)
ONE_SHOT_PCIE_PER_KB_US = Constant(0.304, "us", "cited", "the same two points of that report")
NVLINK_FIXED_US = Constant(7.2, "us", "cited", "one-stage all-reduce over NVLink, 7 to 8 us for these sizes")
NVLINK_PER_KB_US = Constant(0.02, "us", "cited", "the same figures, which hardly grow with the message")


def table() -> list[tuple[str, Constant]]:
    """Every constant by name."""
    return [(name, value) for name, value in globals().items() if isinstance(value, Constant)]
