"""What will run where, and why: from resolved arguments and from the functions that decide at run time."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section

Row = tuple[str, str, str]
OURS = "triton"
# Class of each backend's draft-extend side, as upstream's factory builds it; the gate of its graph names classes.
_EXTEND_CLASSES = {
    "triton": "TritonAttnBackend",
    "flashinfer": "FlashInferAttnBackend",
    "flashinfer MLA": "FlashInferMLAAttnBackend",
    "fa3": "FlashAttentionBackend",
    "fa4": "FlashAttentionBackend",
    "flashmla": "FlashMLABackend",
    "trtllm_mla": "TRTLLMMLABackend",
    "cutedsl_mla": "TRTLLMMLABackend",
    "trtllm_mha": "TRTLLMHAAttnBackend",
    "tokenspeed_mla": "TokenspeedMLABackend",
}


@dataclass(frozen=True)
class Side:
    """Attention of a target or draft on one rank."""

    latent: bool
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    layers: int
    dtype: Any
    kv_dtype: Any
    context: int
    config: Any = None


@dataclass(frozen=True)
class Deployment:
    """What a contribution to the deployment gets: resolved ``args`` (upstream's ``ServerArgs``), the machine
    (``gpu`` is None on a CPU), both sides as far as their configurations could be read, and the raw facts."""

    args: Any
    gpu: Machine | None
    target: Side | None
    draft: Side | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Ranks that attention heads are divided over."""
        from sglang.srt.speculative.arguments.hooks import attention_ranks

        return attention_ranks(self.args)

    @property
    def draft_tokens(self) -> int:
        """Rows of a request in a verify; 1 without speculation."""
        return int(self.args.speculative_num_draft_tokens or 1) if self.args.speculative_algorithm else 1

    @property
    def batches(self) -> list[int]:
        """Batch sizes (requests) that graphs are captured for; empty where there are none."""
        decode = getattr(self.args.cuda_graph_config, "decode", None)
        if self.gpu is None or decode is None or str(getattr(decode, "backend", "")).endswith("disabled"):
            return []
        most = self.args.max_running_requests
        sizes = [int(size) for size in decode.bs or []]
        return [size for size in sizes if not most or size <= most] or sizes[:1]

    @property
    def farthest(self) -> str | None:
        """The farthest path between the ranks' GPUs (``NV``, ``PIX`` ... ``SYS``); None for one."""
        paths = section(self.facts, "nvidia").get("paths") or []
        size = int(self.args.tp_size)
        return nvidia.farthest([row[:size] for row in paths[:size]])

    @property
    def graph_of_draft_extend(self) -> bool | None:
        """Whether upstream captures draft extend for the draft's backend; None where that is not known."""
        known = _EXTEND_CLASSES.get(self._extend_name)
        return known in graph_classes() if known else None

    @property
    def _extend_name(self) -> str:
        backend, _ = draft_backend(self.args, "draft_extend")
        return (
            f"{backend} MLA" if backend == "flashinfer" and self.draft and self.draft.latent else str(backend)
        )

    @classmethod
    def of(cls, args: Any, gpu: Machine | None, facts: Mapping[str, Any]) -> Deployment:
        """Read both configurations through upstream's own ``ModelConfig``."""
        target = _side(args, args.get_model_config(), args)
        draft = None
        if args.speculative_algorithm and args.speculative_draft_model_path:
            from sglang.srt.configs.model_config import ModelConfig

            config = ModelConfig.from_server_args(
                args,
                model_path=args.speculative_draft_model_path,
                model_revision=args.speculative_draft_model_revision,
                is_draft_model=True,
            )
            draft = _side(args, config, args)
        return cls(args, gpu, target, draft, facts)


def _side(args: Any, config: Any, server: Any) -> Side:
    import torch
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.speculative.arguments.hooks import attention_ranks

    ranks = attention_ranks(server)
    names = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}
    kv_dtype = names.get(str(args.kv_cache_dtype), config.dtype)
    latent = config.attention_arch == AttentionArch.MLA
    heads = max(int(config.num_attention_heads) // ranks, 1)
    if latent:
        rank, rope = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
        shape = (heads, 1, rank + rope, rank)
    else:
        width = int(getattr(config, "v_head_dim", 0) or config.head_dim)
        shape = (heads, max(int(config.get_num_kv_heads(ranks)), 1), int(config.head_dim), width)
    return Side(
        latent,
        *shape,
        layers=int(config.num_hidden_layers),
        dtype=config.dtype,
        kv_dtype=kv_dtype,
        context=int(config.context_len),
        config=config,
    )


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


# -- attention ------------------------------------------------------------------------------------------------


def _attention(it: Deployment) -> list[Row]:
    prefill, decode = (str(name) for name in it.args.get_attention_backends())
    given = bool(it.args.attention_backend or it.args.prefill_attention_backend)
    found = [("attention, prefill", prefill, "the server's choice for this model and GPU" if given else "")]
    if not it.args.speculative_algorithm:
        found.append(("attention, decode", *_path(it, it.target, decode, 1, "decode")))
        return found
    verify = decode if it.args.speculative_attention_mode == "decode" else prefill
    found.append(("attention, verify", *_path(it, it.target, verify, it.draft_tokens, "verify")))
    for about, kind, tokens in (("draft", "decode", 1), ("draft extend", "draft_extend", it.draft_tokens)):
        backend, refused = draft_backend(it.args, kind)
        if refused:
            found.append((f"attention, {about}", "refused", refused))
        elif backend is None:
            found.append((f"attention, {about}", "none", "one step: the draft runs in its extend only"))
        else:
            found.append((f"attention, {about}", *_path(it, it.draft, backend, tokens, about)))
    return found


def draft_backend(args: Any, kind: str) -> tuple[str | None, str]:
    """The backend that upstream's factory takes for the draft's ``decode`` or ``draft_extend``, or its refusal."""
    if str(args.device) == "cpu":
        return str(args.speculative_draft_attention_backend or args.attention_backend), ""
    module: Any = importlib.import_module("sglang.srt.speculative.draft_utils")
    factory = module.DraftBackendFactory
    probe = factory(args, None, int(args.speculative_eagle_topk or 1), int(args.speculative_num_steps or 1))
    taken: list[str] = []

    def create(backend_name: str, backend_map: dict[str, Any], error_template: str) -> None:
        """Upstream's choice among the backends, with a note in place of each one's construction."""
        notes = {name: functools.partial(taken.append, name) for name in backend_map}
        factory._create_backend(probe, backend_name, notes, error_template)

    probe._create_backend = create
    # The factory asks the running process for its settings, and the draft's model for what it needs.
    stand_ins = {
        "get_spec": lambda: args,
        "_assert_draft_needs_no_conv_sidecar": lambda *_: None,
    }
    kept = {name: getattr(module, name) for name in stand_ins if hasattr(module, name)}
    try:
        for name in kept:
            setattr(module, name, stand_ins[name])
        method = probe.create_decode_backend if kind == "decode" else probe.create_draft_extend_backend
        inspect.unwrap(method.__func__)(probe)
    except ValueError as error:
        return None, str(error)
    except Exception as error:
        if not taken:
            return None, f"not known ({type(error).__name__}: {error})"
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
    return (taken[0] if taken else None), ""


def _path(it: Deployment, side: Side | None, backend: str, tokens: int, what: str) -> tuple[str, str]:
    """Which kernel a backend runs for rows of this width, with the reason."""
    if it.gpu is None:
        return f"PyTorch ({backend})", "a CPU has no captured graphs and no Triton kernels"
    if backend != OURS:
        text = "the fork's split-KV kernels are in the triton backend"
        if what in ("verify", "draft extend"):
            text += "; --attention-backend triton takes them"
        return f"{backend}, upstream's kernel", text
    if side is None:
        return OURS, "the configuration of the model could not be read"
    from sglang.fork import enabled
    from sglang.srt.layers.attention.verify.admission import AttentionRequest, admit
    from sglang.srt.layers.attention.verify.plan import DeviceTraits, make_plan

    if not enabled("verify-attention"):
        return "triton, stock kernel", "the topic verify-attention is off"
    request = AttentionRequest(
        kind="mla" if side.latent else "gqa",
        batch=1,
        tokens=tokens,
        q_heads=side.q_heads,
        kv_heads=side.kv_heads,
        qk_dim=side.qk_dim,
        v_dim=side.v_dim,
        q_dtype=side.dtype,
        kv_dtype=side.kv_dtype,
        capability=it.gpu.capability,
        mask="none" if (it.args.speculative_eagle_topk or 1) == 1 else "full",
        page_size=int(it.args.page_size or 1),
    )
    if (it.args.speculative_eagle_topk or 1) > 1 and what == "verify":
        return "triton, stock kernel", "tree drafts (topk above 1) are served by the stock kernel"
    admitted = admit(request)
    if not admitted.ok:
        return "triton, stock kernel", admitted.reason
    plan = make_plan(request, DeviceTraits(it.gpu.capability, it.gpu.multiprocessors or 1), side.context)
    if not plan.use:
        return "triton, stock kernel", plan.reason
    return "triton, the fork's split-KV kernel", f"{plan.reason}; compiled at first use"


# -- the rest -------------------------------------------------------------------------------------------------


def _moe(it: Deployment) -> list[Row]:
    config = getattr(it.target.config, "hf_text_config", None) if it.target else None
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    if not experts:
        return []
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


def graph_classes() -> frozenset[str]:
    """Classes that upstream captures a draft-extend graph for, read from the source of its gate."""
    import sglang

    # The file is read, not imported: it wants modules that only a GPU machine has.
    file = Path(str(sglang.__file__)).parent / "srt" / "speculative" / "eagle_worker_v2.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_gate(node.targets[0]) and isinstance(node.value, ast.List):
            found |= {entry.id for entry in node.value.elts if isinstance(entry, ast.Name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_gate(node.func.value):
            found |= {entry.id for entry in node.args if isinstance(entry, ast.Name)}
    return frozenset(found)


def _is_gate(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "graph_supported_backend_types"


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
        named = _EXTEND_CLASSES.get(it._extend_name, it._extend_name)
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
    ("attention", _attention),
    ("MoE", _moe),
    ("all-reduce", _all_reduce),
    ("graphs", _graphs),
    ("KV cache", _cache),
    ("scheduler", _scheduling),
)
