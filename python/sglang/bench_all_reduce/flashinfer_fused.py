"""FlashInfer's all-reduce with add and norm, which upstream switches on by itself for DeepSeek-type models on SM90.

Asked for by ``--flashinfer`` only: its module takes minutes to compile, so it is measured where it is compiled
already, and its memory is exchanged by a way of its own, which no preflight has tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.bench_all_reduce import methods
from sglang.bench_all_reduce.methods import Method, Step
from sglang.srt.distributed.one_shot import fusion_build
from sglang.srt.distributed.one_shot.policy import FUSED

NAME = "flashinfer"
#: Rows of its workspace; the largest message of this bench is 64.
MOST_ROWS = 128


def reason_against(found: Mapping[str, Any] | None, capability: tuple[int, int]) -> str:
    """Why it is not measured, or "". ``trtllm``, its backend on SM90, makes no multicast object; SM100's does."""
    if capability[0] != 9:
        return f"measured on SM90 only, this is SM{capability[0]}{capability[1]}"
    if found is None:
        return "FlashInfer is not installed"
    if not found["built"]:
        return f"not compiled, which takes minutes: {fusion_build.COMMAND}"
    return ""


def open_workspace(rank: int, ranks: int, hidden: int, dtype: torch.dtype, group: Any) -> Any:
    """Its workspace as upstream makes it (layers/flashinfer_comm_fusion.py). Collective; ``group`` is on NCCL."""
    from flashinfer.comm import create_allreduce_fusion_workspace
    from flashinfer.comm.mnnvl import TorchDistBackend

    return create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=ranks,
        rank=rank,
        max_token_num=MOST_ROWS,
        hidden_dim=hidden,
        dtype=dtype,
        comm_backend=TorchDistBackend(group=group),
    )


def method(workspace: Any, reduce: Callable[..., Any] | None = None, pattern: Any = None) -> Method:
    """Sum, add and norm in one launch, with dependent launch as upstream has it.

    Args:
        workspace: from ``open_workspace``.
        reduce, pattern: FlashInfer's function and its name for this form; None takes them from FlashInfer.
    """
    if reduce is None:
        from flashinfer import comm

        reduce, pattern = comm.allreduce_fusion, comm.AllReduceFusionPattern.kARResidualRMSNorm

    def prepare(x: torch.Tensor) -> Step:
        residual, weight = methods.norm_operands(x)
        out, kept = torch.empty_like(x), torch.empty_like(x)

        def step(message: torch.Tensor) -> None:
            reduce(
                input=message,
                workspace=workspace,
                pattern=pattern,
                launch_with_pdl=True,
                trigger_completion_at_end=False,
                residual_in=residual,
                residual_out=kept,
                norm_out=out,
                rms_gamma=weight,
                rms_eps=methods.EPS,
            )

        return step

    return Method(NAME, FUSED, "upstream", prepare)


def absent(why: str) -> Method:
    """It cannot run here."""
    return Method(NAME, FUSED, "upstream", missing=why)
