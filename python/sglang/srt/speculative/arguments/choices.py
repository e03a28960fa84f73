"""Options that the target and the draft decide between them: where one value serves both, it is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.arguments.configs import attention_name, is_mla, loaded_dtype, quantization
from sglang.srt.speculative.arguments.faults import ArgumentFault

DRAFT_BACKEND = "--speculative-draft-attention-backend"
DRAFT_QUANTIZATION = "--speculative-draft-model-quantization"
NOT_QUANTIZED = "unquant"

# Attention backends that read one compressed latent head, and those that cannot.
LATENT_ONLY = frozenset(
    {"cutedsl_mla", "cutlass_mla", "dsa", "dsv4", "flashmla", "nsa", "tokenspeed_mla", "trtllm_mla"}
)
PER_HEAD_ONLY = frozenset({"hpc_ops", "trtllm_mha"})
# Backends that upstream can draft with on a CUDA device. A test holds the list to the composed server.
DRAFTING = frozenset(
    """
    aiter ascend cutedsl_mla dsa dsv4 fa3 fa4 flashinfer flashmla hybrid_linear_attn intel_amx nsa tokenspeed_mla triton
    trtllm_mha trtllm_mla
    """.split()  # noqa: SIM905
)
# Serves both kinds of attention on every CUDA device, any page size, and in captured graphs.
BOTH_KINDS = "triton"

# Methods that only describe how a checkpoint was packed; the others quantise while loading.
CHECKPOINT_ONLY = frozenset(
    {
        "auto-round",
        "awq",
        "awq_marlin",
        "compressed-tensors",
        "gptq",
        "gptq_marlin",
        "marlin",
        "moe_wna16",
        "qoq",
        "w4afp8",
    }
)


@dataclass(frozen=True)
class Choice:
    """A value to set, and the sentence to log about it."""

    value: str
    note: str


def shared_dtype(flag: str, target: Mapping[str, Any], draft: Mapping[str, Any]) -> Choice | None:
    """The dtype to load both sides in, where ``--dtype auto`` would give each its own.

    The draft's first projection multiplies the target's hidden states, so two dtypes end in a matmul error
    after minutes of loading. The target's is kept: it is what the user gets without speculation.
    """
    if flag.lower() != "auto":
        return None
    ours, theirs = loaded_dtype(target, flag), loaded_dtype(draft, flag)
    if ours is None or theirs is None or ours == theirs:
        return None
    return Choice(
        ours, f"--dtype filled in with {ours}, the target's, since the draft alone would be {theirs}"
    )


def draft_quantization(
    target_flag: str | None, draft_flag: str | None, draft: Mapping[str, Any]
) -> Choice | None:
    """The draft's method where it would inherit the target's without being quantised.

    Args:
        target_flag: ``--quantization`` as given.
        draft_flag: ``--speculative-draft-model-quantization`` as given.

    Raises:
        ArgumentFault: the method was asked for the draft itself, which is not quantised.
    """
    method = draft_flag or target_flag
    if method not in CHECKPOINT_ONLY or quantization(draft) is not None:
        return None
    if draft_flag is not None:
        raise ArgumentFault(
            f"{DRAFT_QUANTIZATION} {draft_flag}",
            "reads weights that are already packed, and the draft's config.json has no quantization_config",
            f"give {DRAFT_QUANTIZATION} {NOT_QUANTIZED}, or leave it out",
            code="draft-quantization",
        )
    return Choice(
        NOT_QUANTIZED,
        f"{DRAFT_QUANTIZATION} filled in with {NOT_QUANTIZED}, since the draft is not packed as --quantization "
        f"{target_flag} says of the target",
    )


def draft_backend(
    given: str | None, inherited: tuple[str | None, ...], draft: Mapping[str, Any], *, device: str
) -> Choice | None:
    """The draft's attention backend where the one it would get cannot draft, or not with its kind of attention.

    Args:
        given: ``--speculative-draft-attention-backend`` as given.
        inherited: backends that the target uses in prefill and decode, which a draft takes over by default.
        device: on any other than ``cuda`` only a backend that was asked for is judged, by the kind of attention.

    Raises:
        ArgumentFault: the backend was asked for the draft itself.
    """
    unfit = PER_HEAD_ONLY if is_mla(draft) else LATENT_ONLY
    kind = attention_name(draft)

    def problem(backend: str) -> str | None:
        if backend in unfit:
            return f"cannot serve the draft's {kind} attention"
        if device == "cuda" and backend not in DRAFTING:
            return "cannot run a draft"
        return None

    if given is not None:
        reason = problem(given)
        if reason is not None:
            fitting = ", ".join(sorted(DRAFTING - unfit))
            raise ArgumentFault(
                f"{DRAFT_BACKEND} {given}",
                f"{reason} (those that can: {fitting})",
                f"give {DRAFT_BACKEND} {BOTH_KINDS}, or leave it out",
                code="draft-backend",
            )
        return None
    if device != "cuda":
        return None
    clash = next((backend for backend in inherited if backend is not None and problem(backend)), None)
    if clash is None:
        return None
    return Choice(
        BOTH_KINDS,
        f"{DRAFT_BACKEND} filled in with {BOTH_KINDS}, since the target's {clash} {problem(clash)}",
    )
