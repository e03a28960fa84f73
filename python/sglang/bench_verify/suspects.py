"""Which difference between two runs can have moved which phases of a cycle, and why: rules as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL = ("draft", "verify", "sample", "draft_extend", "host_gap", "decode")
DEVICE = ("draft", "verify", "sample", "draft_extend", "decode")
REDUCED = ("draft", "verify", "draft_extend", "decode")


@dataclass(frozen=True)
class Rule:
    """Differences whose name matches ``pattern`` can move ``phases``, for the reason ``why``.

    ``weight`` ranks suspects: 3 changes what runs, 2 changes how fast it runs, 1 may, 0 does not.
    """

    pattern: str
    weight: int
    phases: tuple[str, ...]
    why: str


RULES = (
    Rule(
        r"topic\.verify-attention", 3, ("verify", "decode"), "a patch that picks the verify attention kernel"
    ),
    Rule(
        r"topic\.(run-|cpu-|verify-|full-|cycle-|all-reduce|reduce).*", 3, ALL, "a patch of the verify cycle"
    ),
    Rule(r"topic\..*", 3, ALL, "a patch was on in one run and not in the other"),
    Rule(r"(base|fork)_version", 3, ALL, "another version of the code"),
    Rule(r"commit", 2, ALL, "another commit of the code"),
    Rule(
        r"argument\.(attention_backend|.*attention.*)",
        3,
        ("verify", "decode", "draft_extend"),
        "another attention kernel",
    ),
    Rule(r"argument\.speculative_.*", 3, ALL, "another draft, width or acceptance rule"),
    Rule(
        r"argument\.(disable_cuda_graph|cuda_graph_.*)",
        3,
        ALL,
        "what replays as a graph and what launches eagerly",
    ),
    Rule(r"argument\.(tp_size|dp_size|ep_size|pp_size)", 3, ALL, "another share of the model on each GPU"),
    Rule(
        r"argument\.(quantization|kv_cache_dtype|dtype|model_path|page_size)",
        3,
        ALL,
        "another number of bytes to read",
    ),
    Rule(r"argument\..*", 1, ALL, "another server argument"),
    Rule(r"rank\.missing", 1, REDUCED, "one of the runs did not say what its workers saw"),
    Rule(r"rank\.NCCL_.*", 3, REDUCED, "NCCL reads it inside the worker, where it differed"),
    Rule(r"variable\.SGLANG_FORK_(COMMIT|IMAGE)", 0, (), "told by commit and container"),
    Rule(
        r"rank\.SGLANG_(FORK_(COMMIT|IMAGE|DISABLE)|SPEC_BASELINE)",
        0,
        (),
        "told by commit, container and topics",
    ),
    Rule(r"variable\.NCCL_.*", 2, REDUCED, "the algorithm, protocol or path of every all-reduce"),
    Rule(r"variable\.SGLANG_SIMULATE_.*", 3, ALL, "simulated acceptance is not acceptance"),
    Rule(r"variable\.SGLANG_FORK_DISABLE", 3, ALL, "topics of the fork switched off"),
    Rule(r"variable\.(CUDA_LAUNCH_BLOCKING|CUDA_DEVICE_MAX_CONNECTIONS)", 3, ALL, "serialises launches"),
    Rule(r"variable\.(OMP_NUM_THREADS|MKL_NUM_THREADS)", 2, ALL, "threads of every CPU operator"),
    Rule(r"variable\.(SGLANG|SGL|TORCH|TRITON|PYTORCH|FLASHINFER).*", 2, ALL, "switches of the framework"),
    Rule(r"variable\..*", 1, ALL, "another variable"),
    Rule(r"gpu\.(name|count|mig)", 3, DEVICE, "another GPU"),
    Rule(r"gpu\.pcie_(generation|width)", 2, REDUCED, "the link that carries every all-reduce"),
    Rule(r"gpu\.nvlinks", 3, REDUCED, "the link that carries every all-reduce"),
    Rule(r"gpu\.(power_limit_w|sm_clock_max_mhz|memory_mib)", 2, DEVICE, "how fast the GPU may run"),
    Rule(r"load\.(sm_clock_mhz|memory_clock_mhz|power_w)", 2, DEVICE, "clock or power under load"),
    Rule(r"load\.missing", 1, DEVICE, "one of the runs recorded no clocks, power or link under load"),
    Rule(r"load\.pcie_.*", 2, REDUCED, "the link trained to another speed under load"),
    Rule(r"load\.temperature_c", 1, DEVICE, "a hot GPU lowers its clock"),
    Rule(r"topology", 2, REDUCED, "another path between the GPUs"),
    Rule(r"gpu\.driver|cuda|cuda_driver", 2, DEVICE, "driver and run-time libraries"),
    Rule(r"nccl_version|rank\.nccl_version", 2, REDUCED, "another NCCL"),
    Rule(r"package\.(torch|triton|sglang.*|sgl-kernel|flashinfer.*)", 3, ALL, "other kernels"),
    Rule(r"package\..*", 1, ALL, "another package"),
    Rule(
        r"kernel_command_line\.(iommu|amd_iommu|intel_iommu|pci)",
        2,
        REDUCED,
        "whether GPUs may talk to each other directly",
    ),
    Rule(r"kernel_command_line\..*", 1, ("host_gap",), "another kernel setting"),
    Rule(r"kernel|container", 1, ("host_gap",), "another host system"),
    Rule(r"cpu|cpu_count|host", 2, ("host_gap", "decode"), "another processor: launches and host work"),
    Rule(r"python", 1, ("host_gap",), "another Python"),
    Rule(r"uptime_s", 0, (), "a reboot between the runs; a cause only through what it changed"),
    Rule(r"command", 0, (), "the command line; its effects are listed by name"),
)


# What only carries data between ranks cannot have slowed a server of one.
COMMUNICATION = re.compile(r"(rank|variable)\.NCCL_.*|(rank\.)?nccl_version|gpu\.nvlinks|topology")
ONE_RANK = Rule("one rank", 0, (), "no cause here: one rank in both runs, nothing is reduced between ranks")


def rule_for(name: str) -> Rule:
    """The first rule whose pattern matches the whole name; an unknown name may matter."""
    for rule in RULES:
        if re.fullmatch(rule.pattern, name):
            return rule
    if name.startswith("rank."):
        return rule_for(f"variable.{name.removeprefix('rank.')}")
    return Rule(name, 1, ALL, "a difference no rule knows")
