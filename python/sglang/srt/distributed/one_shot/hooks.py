"""What patched upstream code calls. Each function decides little: it finds the group's communicator and asks it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.fork import fallbacks
from sglang.srt.distributed.one_shot import attach as attaching
from sglang.srt.distributed.one_shot import capture, ending, gate, settings
from sglang.srt.distributed.one_shot.communicator import PATH, Communicator
from sglang.srt.distributed.one_shot.exchange import Exchange
from sglang.srt.distributed.one_shot.slow import telling
from sglang.srt.distributed.one_shot.watch import RankWatch

#: What to run where a start stands still.
PROBE = "`python -m sglang.bench_all_reduce.start_probe` tells which step it is"

#: What became of each group of this process, by its name.
states: dict[str, attaching.State] = {}
#: The watch of this process: one, on the first group that has one.
watches: list[RankWatch] = []
_ATTRIBUTE = "_one_shot_communicator"


def init_group(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """After upstream has made a process group: watch its ranks, and try to give it our all-reduce."""
    with telling(f"making the process group {kwargs.get('group_name', '')}", PROBE):
        original(self, *args, **kwargs)
    name = str(self.unique_name).rpartition(":")[0]
    elastic = kwargs.get("recovered_rank") or kwargs.get("max_world_size") or kwargs.get("rank_offset")
    if self.world_size < 2 or name not in gate.GROUPS or elastic:
        return
    exchange = Exchange(_store(), self.rank_in_group, self.world_size, f"{self.unique_name}/{self.ranks}")
    watch = _watch(self, exchange)
    decision = gate.group(name, self.device.type, self.world_size, settings.mode())
    if not decision:
        states[self.unique_name] = attaching.State(self.unique_name, None, decision.reason, decision.detail)
        if decision.reason == "too many ranks":
            fallbacks.record(PATH, decision.reason, detail=decision.detail)
        return
    with (
        telling("the all-reduce preflight"),
        watch.phase("the all-reduce preflight") if watch else nullcontext(),
    ):
        state = attaching.attach(self, exchange)
    states[self.unique_name] = state
    setattr(self, _ATTRIBUTE, state.communicator)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _watch(group: Any, exchange: Exchange) -> RankWatch | None:
    """A watch over the group's ranks where they share a machine; one a process.

    Ranks in containers may share a name and no folder: whoever cannot take part says so, and nobody watches.
    """
    import platform

    hosts = exchange.require("host", platform.node(), attaching.ANSWER_S)
    if watches or len(set(hosts)) > 1:
        return None
    place, problem = exchange.require(
        "folder", _shared_folder() if exchange.rank == 0 else ["", ""], attaching.ANSWER_S
    )[0]
    rank, folder = exchange.rank, Path(place)

    def lost(loss: Any) -> None:
        ending.end(loss, rank, partial(_abort_all))

    watch: RankWatch | None = None
    try:
        if not problem:
            watch = RankWatch(folder, rank, exchange.size, lost)
    except OSError as error:
        problem = str(error)
    problems = exchange.require("locked", problem, attaching.ANSWER_S)
    if watch is not None and not any(problems):
        try:
            watch.start()
        except OSError as error:
            problem = str(error)
    problems = exchange.require("opened", problem, attaching.ANSWER_S)
    if exchange.rank == 0 and place:
        shutil.rmtree(folder, ignore_errors=True)
    if watch is None or any(problems):
        if watch is not None:
            watch.stop()
        words = [f"rank {other}: {text}" for other, text in enumerate(problems) if text]
        fallbacks.record(PATH, "no rank watch", detail="; ".join(words))
        return None
    watches.append(watch)
    return watch


def _shared_folder() -> list[str]:
    """A new folder for the locks and "", or "" and why there is none; a container may have no ``/tmp`` to write to."""
    problem = ""
    for parent in (None, "/dev/shm"):
        try:
            return [tempfile.mkdtemp(prefix="sglang-ranks-", dir=parent), ""]
        except OSError as error:
            problem = problem or str(error)
    return ["", problem]


def _abort_all() -> None:
    for state in states.values():
        if state.communicator is not None:
            state.communicator.kernels.abort()


def communicator_of(group: Any) -> Communicator | None:
    """The communicator of upstream's coordinator, None where it has none."""
    found: Communicator | None = getattr(group, _ATTRIBUTE, None)
    return found


def all_reduce(original: Callable[..., torch.Tensor], self: Any, input_: torch.Tensor) -> torch.Tensor:
    """Where upstream picks a communicator: ours if it has one that takes this tensor."""
    communicator = communicator_of(self)
    if communicator is None or torch.compiler.is_compiling() or not communicator.takes(input_):
        return original(self, input_)
    return communicator.all_reduce(input_)


def announces_fusion(original: Callable[..., bool], batch_size: int) -> bool:
    """Where upstream asks whether a reduction is left to the next norm.

    A yes is a promise: ``fused_norm`` must reduce whatever happens. A no leaves upstream's own answer.
    """
    if not torch.compiler.is_compiling() and _fuses(batch_size):
        return True
    return original(batch_size)


def _fuses(rows: int) -> bool:
    if not any(state.communicator is not None for state in states.values()):
        return False
    if not _may_defer():
        return False
    answers = []
    for attention in (True, False):
        communicator = communicator_of(_norm_group(attention))
        answers.append(communicator is not None and communicator.fuses(rows))
    return all(answers)


def _may_defer() -> bool:
    """``gate.defers`` of this server's model and layout."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.layers.moe import get_moe_a2a_backend
    from sglang.srt.server_args import get_global_server_args

    arguments = get_global_server_args()
    return gate.defers(
        arguments.get_model_config().hf_config.architectures[0],
        data_parallel=is_dp_attention_enabled(),
        all_to_all=not get_moe_a2a_backend().is_none(),
        deterministic=bool(arguments.enable_deterministic_inference),
    )


def _norm_group(attention: bool) -> Any:
    from sglang.srt.distributed.parallel_state import get_attn_tp_group, get_moe_ep_group, get_moe_tp_group
    from sglang.srt.runtime_context import get_parallel

    if attention:
        return get_attn_tp_group()
    return get_moe_ep_group() if get_parallel().moe_ep_size > 1 else get_moe_tp_group()


def fused_norm(
    original: Callable[..., Any],
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    """Where upstream's norm does the reduction that a layer left to it.

    The reduction happens on every path: fused, or as a plain one before the norm, or by upstream's own kernel,
    whose refusals ``stock_kernel`` catches.
    """
    arguments = (norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
    if residual is None or torch.compiler.is_compiling():
        return original(*arguments)
    group = _norm_group(use_attn_tp_group)
    communicator = communicator_of(group)
    if communicator is None:
        return original(*arguments)
    kept = residual if post_residual_addition is None else residual + post_residual_addition
    decision = gate.norm(norm_module)
    if not decision:
        fallbacks.record(PATH, f"fused norm: {decision.reason}", detail=decision.detail)
    elif communicator.takes_fused(x, kept, weight):
        return communicator.all_reduce_rms_norm(x, kept, weight, norm_module.variance_epsilon)
    return reduce_and_norm(group, norm_module, x, kept)


def reduce_and_norm(
    group: Any, norm_module: Any, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduction and the norm one after the other, (normed, new residual).

    The residual is copied first: upstream's norms write into it, and where a fused norm was announced, captured
    hidden states may hold a reference to it.
    """
    reduced = group.all_reduce(x)
    result: tuple[torch.Tensor, torch.Tensor] = norm_module.forward(reduced, residual.clone())
    return result


def stock_kernel(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around upstream's fused kernel: where it refuses a reduction that was left to it, reduce here.

    Upstream's norm would go on without any reduction, which is wrong on every rank and visible on none.
    """
    result = original(*args, **kwargs)
    if result[0] is not None:
        return result
    fallbacks.record(PATH, "upstream's fused kernel refused", detail="reduced and normed separately instead")
    x, residual, weight = kwargs["input_tensor"], kwargs["residual"], kwargs["weight"]
    group = _norm_group(kwargs.get("use_attn_tp_group", True))
    wide = group.all_reduce(x).float() + residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + kwargs["eps"])
    return (wide * scale * weight.float()).to(x.dtype), wide.to(residual.dtype)


def fusion_workspace(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around upstream's set-up of FlashInfer's fused all-reduce: a compile, and an exchange without a time limit."""
    with telling(
        "FlashInfer's fused all-reduce workspace",
        f"--enforce-disable-flashinfer-allreduce-fusion starts without it; {PROBE}",
    ):
        return original(self, *args, **kwargs)


def capture_graphs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a runner's capture: launches go to the workspace of its model."""
    draft = bool(getattr(self.model_runner, "is_draft_worker", False))
    with capture.graph_of(capture.DRAFT if draft else capture.TARGET):
        return original(self, *args, **kwargs)


def capture_stream(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the innermost part of a capture: an error is told to the other ranks before anything unwinds."""
    if not watches:
        return original(self, *args, **kwargs)
    draft = bool(getattr(self.model_runner, "is_draft_worker", False))
    with watches[0].phase(f"graph capture of the {'draft' if draft else 'target'}"):
        return original(self, *args, **kwargs)


#: How long upstream waits for core dumps of CUDA before a server whose rank died goes down (60 s by default).
DUMP_WAIT = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"


def crash_dump(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around what a server does before it goes down: no wait for core dumps that the driver was not told to write.

    Upstream waits a minute for them with the port open, whether or not ``CUDA_ENABLE_USER_TRIGGERED_COREDUMP`` is set.
    """
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        os.environ.setdefault(DUMP_WAIT, "0")
    return original(self, *args, **kwargs)


def describe() -> list[tuple[str, str]]:
    """Lines for the doctor: what became of every group of this process."""
    if not states:
        return [("all-reduce", "no group of several ranks")]
    return [line for state in states.values() for line in state.describe()]


def internal_state(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the scheduler's internal state: adds ``one_shot_all_reduce``, this rank's view of every group."""
    output = original(self, *args, **kwargs)
    output.internal_state["one_shot_all_reduce"] = {
        name: {
            "ours": state.communicator is not None,
            "reason": state.reason,
            "launches": state.communicator.launches() if state.communicator is not None else {},
            "lines": [list(line) for line in state.describe()],
        }
        for name, state in states.items()
    }
    return output
