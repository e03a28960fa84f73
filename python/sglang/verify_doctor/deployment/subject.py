"""What is described: resolved arguments, the machine, and the attention of target and draft on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.verify_doctor.deployment import drafting
from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.deployment.weights import predicted_layers
from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section

Row = tuple[str, str, str]


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
        known = drafting.EXTEND_CLASSES.get(self.extend_name)
        return known in drafting.graph_classes() if known else None

    @property
    def extend_name(self) -> str:
        """The backend of draft extend, as ``EXTEND_CLASSES`` has it."""
        backend, _ = drafting.draft_backend(self.args, "draft_extend")
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
        layers=predicted_layers(config) or int(config.num_hidden_layers),
        dtype=config.dtype,
        kv_dtype=kv_dtype,
        context=int(config.context_len),
        config=config,
    )
