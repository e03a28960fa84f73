"""What will run where, and why: from resolved arguments and from the functions that decide at run time."""

from __future__ import annotations

from typing import Any

from sglang.verify_doctor.deployment import attention
from sglang.verify_doctor.deployment.drafting import EXTEND_CLASSES
from sglang.verify_doctor.deployment.subject import Deployment, Row


def rows(it: Deployment) -> list[Row]:
    """Every row, in the order of the report. One that cannot be told costs only itself."""
    found: list[Row] = []
    for about, describe in _PARTS:
        try:
            found += describe(it)
        except Exception as error:
            found.append((about, "not known", f"{type(error).__name__}: {error}"))
    return found


def arguments(args: Any) -> dict[str, Any]:
    """The resolved values that a reader asks for first."""
    names = (
        "tp_size",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "page_size",
        "context_length",
        "mem_fraction_static",
        "max_running_requests",
        "chunked_prefill_size",
        "speculative_algorithm",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "nccl_profile",
    )
    return {name: getattr(args, name, None) for name in names}


def _moe(it: Deployment) -> list[Row]:
    config = getattr(it.target.config, "hf_text_config", None) if it.target else None
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    if not experts:
        return []
    if it.gpu is None:
        return [("MoE", "PyTorch", "upstream's path for experts on a processor")]
    runner = str(it.args.moe_runner_backend)
    if runner != "auto":
        return [("MoE", runner, "resolved by the server for this model and GPU")]
    method = str(getattr(it.target.config, "quantization", None) or "") if it.target else ""
    known = {
        "": "triton (bf16 experts)",
        "fp8": "triton (fp8 experts)",
        "compressed-tensors": "marlin (INT4 experts), where the weights are packed WNA16",
        "awq": "marlin",
        "gptq": "marlin",
    }
    what = known.get(method, f"by the quantisation method {method}")
    return [("MoE", what, "--moe-runner-backend auto: the quantisation method chooses when weights load")]


def _all_reduce(it: Deployment) -> list[Row]:
    return [("all-reduce", *_reduction(it))]


def _reduction(it: Deployment) -> tuple[str, str]:
    size = int(it.args.tp_size)
    if size <= 1:
        return "none", "one rank"
    if it.gpu is None:
        return "gloo or shared memory", "ranks on a CPU"
    fused = bool(getattr(it.args, "enable_flashinfer_allreduce_fusion", False))
    tail = ", fused with the norm by FlashInfer" if fused else ", add and norm apart"
    if it.args.disable_custom_all_reduce:
        return f"NCCL{tail}", "custom all-reduce is switched off"
    far = it.farthest
    if far == "NV":
        return f"upstream's custom kernel{tail}", "every pair of ranks is joined by NVLink"
    if far is None:
        return "not known", "the facts hold no matrix of paths"
    if size > 2:
        return f"NCCL{tail}", f"upstream's custom kernel wants NVLink for more than 2 ranks ({far} here)"
    return f"upstream's custom kernel{tail}", f"2 ranks over {far}"


def _graphs(it: Deployment) -> list[Row]:
    if it.gpu is None:
        return [("graphs", "none", "a CPU captures none")]
    if not it.batches:
        return [("graphs", "none", "decode graphs are switched off: every launch costs host time")]
    text = ", ".join(map(str, _short(it.batches)))
    width = it.draft_tokens
    found: list[Row] = [
        (
            "graphs, verify" if it.args.speculative_algorithm else "graphs, decode",
            f"batch {text} ({width * max(it.batches)} rows at most)",
            f"{width} rows a request; larger batches run eagerly"
            if width > 1
            else "larger batches run eagerly",
        )
    ]
    if it.args.speculative_algorithm:
        graph = it.graph_of_draft_extend
        what = {True: "captured", False: "eager", None: "not known"}[graph]
        named = EXTEND_CLASSES.get(it.extend_name, it.extend_name)
        found.append(
            ("graphs, draft extend", what, f"upstream's gate {'names' if graph else 'lacks'} {named}")
        )
    prefill = it.args.cuda_graph_config.prefill
    found.append(
        ("graphs, prefill", str(getattr(prefill.backend, "value", prefill.backend)), "resolved by the server")
    )
    return found


def _short(sizes: list[int]) -> list[Any]:
    return sizes if len(sizes) <= 12 else [*sizes[:8], "...", *sizes[-2:]]


def _cache(it: Deployment) -> list[Row]:
    if it.target is None:
        return []
    dtype = str(it.target.kv_dtype).removeprefix("torch.")
    heads = f"{it.target.kv_heads} key heads a rank"
    why = "one latent row a token, kept whole on every rank" if it.target.latent else heads
    return [("KV cache", f"{dtype}, page size {it.args.page_size}", why)]


def _scheduling(it: Deployment) -> list[Row]:
    overlap = not it.args.disable_overlap_schedule and it.gpu is not None
    what = "host and device overlap" if overlap else "no overlap of host and device"
    most = it.args.max_running_requests
    what += f", {most} running requests at most" if most else ", as many requests as the cache holds"
    chunk = it.args.chunked_prefill_size
    why = f"mem-fraction-static {it.args.mem_fraction_static}, " + (
        f"prefill in chunks of {chunk}" if chunk and chunk > 0 else "prefill in one piece"
    )
    return [("scheduler", what, why)]


_PARTS = (
    ("attention", attention.rows),
    ("MoE", _moe),
    ("all-reduce", _all_reduce),
    ("graphs", _graphs),
    ("KV cache", _cache),
    ("scheduler", _scheduling),
)
