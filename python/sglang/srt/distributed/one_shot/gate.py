"""Is the one-shot all-reduce *right* here? Speed is no question of this file (``policy``).

Every answer is a pure function of what all ranks share, because ranks that answer differently wait for each other
for ever. The kernels' own limits are ``kernels.admit``; here is what the server around them adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.distributed.one_shot.kernels import MAX_RANKS, MIN_RANKS

#: Groups that carry a layer's reductions. The others keep upstream's choice.
GROUPS = ("tp",)
#: Bytes of one wide store.
STORE_BYTES = 16


@dataclass(frozen=True)
class Decision:
    """An answer with its reason; ``reason`` has no numbers that change from call to call."""

    ok: bool
    reason: str = ""
    detail: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Decision(True)


#: The setting with which ranks on a CPU reduce through simulated peers.
SIMULATE = "simulate"


def group(name: str, device: str, ranks: int, mode: str = "auto") -> Decision:
    """Whether a process group may have the communicator at all; what upstream alone can tell.

    Args:
        name: upstream's name of the group without its number (``tp``, ``attention_tp``, ``pp`` ...).
        device: device type of the group, ``cuda`` or other.
        ranks: its size.
        mode: ``settings.mode``.
    """
    if name not in GROUPS:
        return Decision(False, "another group", f"{name} keeps upstream's all-reduce")
    if ranks < MIN_RANKS:
        return Decision(False, "one rank", "nothing to reduce")
    if mode == SIMULATE and device != "cpu":
        return Decision(
            False, "peers are simulated on a CPU only", f"SGLANG_FORK_ALL_REDUCE={mode} on {device}"
        )
    if device != "cuda" and mode != SIMULATE:
        return Decision(False, "no GPU", f"{device} has no such kernel")
    if ranks > MAX_RANKS:
        return Decision(False, "too many ranks", f"{ranks} ranks, the kernels serve at most {MAX_RANKS}")
    return YES


@dataclass(frozen=True)
class RankFacts:
    """What a rank says about itself at start.

    Attributes:
        host: name of its machine.
        bus: PCI slot of its GPU.
        name: of its GPU.
        capability: compute capability of its GPU.
        mode: its setting, ``auto``, ``force``, ``off`` or ``simulate``.
        pid: its process.
    """

    host: str
    bus: str
    name: str
    capability: tuple[int, int]
    mode: str
    pid: int


def members(facts: Sequence[RankFacts]) -> Decision:
    """Whether these ranks can share memory. The same list on every rank, so the same answer."""
    modes = {fact.mode for fact in facts}
    if "off" in modes:
        return Decision(False, "switched off", "SGLANG_FORK_ALL_REDUCE=off" + _where(facts, "mode", "off"))
    if len(modes) > 1:
        return Decision(False, "settings differ", f"SGLANG_FORK_ALL_REDUCE is {', '.join(sorted(modes))}")
    if len({fact.host for fact in facts}) > 1:
        return Decision(False, "several machines", "peer memory needs one machine")
    if len({fact.capability for fact in facts}) > 1:
        kinds = ", ".join(f"{fact.capability[0]}.{fact.capability[1]}" for fact in facts)
        return Decision(False, "GPUs differ", f"capabilities {kinds}")
    if len({fact.bus for fact in facts}) < len(facts) and modes != {"force"}:
        return Decision(
            False, "ranks share a GPU", "only SGLANG_FORK_ALL_REDUCE=force allows that, for tests"
        )
    return YES


def _where(facts: Sequence[RankFacts], field: str, value: str) -> str:
    ranks = [str(rank) for rank, fact in enumerate(facts) if getattr(fact, field) == value]
    return "" if len(ranks) == len(facts) else f" on rank {', '.join(ranks)}"


def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Decision:
    """Whether shapes allow sum + residual + RMSNorm in one kernel; dtype and size are ``kernels.admit``'s."""
    if x.dim() != 2:
        return Decision(False, "not two dimensions")
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return Decision(False, "the residual differs in shape or dtype")
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        return Decision(False, "the norm's weight differs in shape or dtype")
    return YES


def defers(architecture: str, *, data_parallel: bool, all_to_all: bool, deterministic: bool) -> bool:
    """Whether a model's layers leave their reduction to the next norm; upstream's rules and its list of models.

    Args:
        architecture: the model's class in its configuration.
        data_parallel: attention is data-parallel.
        all_to_all: experts are reached through an all-to-all.
        deterministic: deterministic inference is on.
    """
    from sglang.srt.arg_groups.overrides import _FLASHINFER_ALLREDUCE_FUSION_ARCHS as knows

    # --enforce-disable-flashinfer-allreduce-fusion is FlashInfer's: who starts without that still gets ours.
    return not (data_parallel or all_to_all or deterministic) and architecture in knows


def norm(module: torch.nn.Module) -> Decision:
    """Whether a norm module computes what the fused kernel does: RMSNorm over the whole row, times a weight."""
    if getattr(module, "variance_size_override", None) is not None:
        return Decision(False, "the norm takes part of a row")
    if getattr(module, "cast_x_before_out_mul", False):
        return Decision(False, "the norm rounds before its weight")
    if getattr(module, "fp32_residual", False):
        return Decision(False, "the residual is kept in float32")
    if not isinstance(getattr(module, "variance_epsilon", None), float):
        return Decision(False, "no RMSNorm")
    return YES


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that wide stores can read.

    Alignment is made rather than refused: an address is the one property of a tensor that ranks need not share,
    and a rank that refuses alone leaves the others waiting for its flag.
    """
    return x if x.data_ptr() % STORE_BYTES == 0 else x.clone()
