"""The steps of upstream's two-GPU start, in its order, each small enough to blame. Run by ``start_probe``.

Where a step stands for upstream code, its place in 0.5.17 is named.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Context:
    """What steps leave for later ones."""

    rank: int
    size: int
    address: str
    made: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One step; ``needed`` ends the round where it fails, since the later ones stand on it."""

    name: str
    work: Callable[[Context], str]
    needed: bool = False


def resolve_name(context: Context) -> str:
    """Gloo resolves the machine's own name for every group: without a name server that is a wait each time."""
    start = time.monotonic()
    found = socket.gethostbyname(socket.gethostname())
    return f"{found} in {time.monotonic() - start:.2f} s"


def world(context: Context) -> str:
    """init_distributed_environment: the default group on NCCL (its communicator is made at its first use)."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(context.rank)
    dist.init_process_group("nccl", init_method=context.address, rank=context.rank, world_size=context.size)
    return "store and default group"


def cpu_group(context: Context) -> str:
    """GroupCoordinator.__init__: a gloo group beside every NCCL group, and a barrier on it. It is upstream's group of
    all ranks, which its custom all-reduce asks for."""
    import torch.distributed as dist
    from sglang.bench_all_reduce import upstream

    group = upstream.as_a_server(context.rank, context.size, context.rank, context.address, "nccl")
    context.made["gloo"] = group.cpu_group
    dist.barrier(group=context.made["gloo"])
    return "upstream's group of all ranks"


def pynccl(context: Context) -> str:
    """PyNcclCommunicator.__init__: upstream's own NCCL communicator, one reduction, a stream synchronised."""
    import torch
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    made = PyNcclCommunicator(group=context.made["gloo"], device=torch.device("cuda", context.rank))
    return f"NCCL {made.nccl_version}"


def nccl_barrier(context: Context) -> str:
    """A barrier on torch's own NCCL group: its communicator is made here. Upstream's first one comes from
    FlashInfer's handle exchange (flashinfer/comm/mnnvl.py, PosixFDHandleExchanger), since everything before uses
    the CPU group or pynccl."""
    import torch
    import torch.distributed as dist

    dist.barrier(device_ids=[context.rank])
    torch.cuda.synchronize()
    return "torch's communicator"


def same_node(context: Context) -> str:
    """in_the_same_node_as: shared memory made by one rank and opened by the others."""
    from sglang.srt.distributed.parallel_state import in_the_same_node_as

    return str(in_the_same_node_as(context.made["gloo"], source_rank=0))


def peer_access(context: Context) -> str:
    """What the driver claims. Upstream takes it for granted unless --enable-p2p-check is given."""
    import torch

    return str(torch.cuda.can_device_access_peer(context.rank, 1 - context.rank))


def legacy_ipc(context: Context) -> str:
    """CustomAllreduce v1: cudaMalloc, cudaIpcGetMemHandle, handles over gloo, cudaIpcOpenMemHandle, and real bytes."""
    import ctypes

    import torch
    import torch.distributed as dist
    from sglang.srt.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    library = CudaRTLibrary()
    size = 4096
    pointer = library.cudaMalloc(size)
    library.cudaMemset(pointer, 0, size)
    handles: list[Any] = [None] * context.size
    dist.all_gather_object(handles, library.cudaIpcGetMemHandle(pointer), group=context.made["gloo"])
    peer = library.cudaIpcOpenMemHandle(handles[1 - context.rank])
    library.cudaMemset(peer, context.rank + 1, size)
    library.cudaDeviceSynchronize()
    dist.barrier(group=context.made["gloo"])
    seen = (ctypes.c_char * size)()
    library.cudaMemcpy(seen, pointer, size)
    torch.cuda.synchronize()
    wrong = sum(byte != 2 - context.rank for byte in bytes(seen))
    if wrong:
        raise RuntimeError(
            f"{wrong} of {size} bytes of the peer did not arrive: peer access is not what it says"
        )
    return "bytes arrived"


def symmetric_memory(context: Context) -> str:
    """CustomAllReduceV2: torch's symmetric memory, whose handles go over sockets and which may bind a multicast."""
    import torch
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import _allocate_symmetric_memory

    made = _allocate_symmetric_memory(1 << 21, torch.device("cuda", context.rank), context.made["gloo"])
    context.made["symmetric"] = made
    return f"multicast {'yes' if int(made[1].multicast_ptr) else 'no'}"


def custom(context: Context) -> str:
    """The custom all-reduce that upstream picks (v2 compiles its kernels at first use), and one reduction."""
    import torch
    from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce

    device = torch.device("cuda", context.rank)
    kind = dispatch_custom_allreduce(group=context.made["gloo"], device=device)
    made = kind(group=context.made["gloo"], device=device)
    if made.disabled:
        return f"{kind.__name__} is off here"
    made.custom_all_reduce(torch.ones(1, 7168, dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()
    return str(kind.__name__)


def fusion_compile(context: Context) -> str:
    """FlashInfer's fused all-reduce, on for DeepSeek-type models on SM90 and SM100: three files for nvcc at first
    use, behind the first NCCL barrier of the start (trtllm_lamport_initialize)."""
    from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

    get_trtllm_comm_module()
    return "compiled or found"


def descriptor_exchange(context: Context) -> str:
    """The exchange that carries its memory handles, with a harmless file: barriers on NCCL, and Unix sockets that are
    read without a time limit (PosixFDHandleExchanger)."""
    import torch.distributed as dist
    from flashinfer.comm.mnnvl import PosixFDHandleExchanger, TorchDistBackend

    exchanger = PosixFDHandleExchanger(TorchDistBackend(group=dist.group.WORLD), context.rank, context.size)
    own = os.open(os.devnull, os.O_RDONLY)
    received = exchanger.allgather(own)
    for descriptor in {own, *received}:
        os.close(descriptor)
    exchanger.close()
    return f"{len(received)} descriptors"


def fusion_workspace(context: Context) -> str:
    """Its workspace: memory made exportable, exchanged as above, mapped. ``trtllm`` is upstream's choice on SM90 and
    makes no multicast object; on SM100 upstream takes ``mnnvl``, which does, and which is not tried here."""
    import torch
    import torch.distributed as dist
    from flashinfer.comm import create_allreduce_fusion_workspace
    from flashinfer.comm.mnnvl import TorchDistBackend

    context.made["fusion"] = create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=context.size,
        rank=context.rank,
        max_token_num=128,
        hidden_dim=7168,
        dtype=torch.bfloat16,
        comm_backend=TorchDistBackend(group=dist.group.WORLD),
    )
    return "workspace"


def one_shot(context: Context) -> str:
    """Ours: build, share, and the preflight that moves real data."""
    import torch
    import torch.distributed as dist
    from sglang.srt.distributed.one_shot import preflight
    from sglang.srt.distributed.one_shot.exchange import Exchange
    from sglang.srt.distributed.one_shot.kernels import open_kernels

    device = torch.device("cuda", context.rank)
    kernels = open_kernels(context.made["gloo"], device)
    store = dist.distributed_c10d._get_default_store()
    verdict = preflight.run(
        kernels, Exchange(store, context.rank, context.size, f"probe{os.getppid()}"), device
    )
    if verdict.fault is not None:
        raise RuntimeError(f"preflight: {verdict.fault}")
    return f"preflight passed in {verdict.seconds:.2f} s"


STEPS = (
    Step("the machine's own name", resolve_name),
    Step("process group (store, NCCL)", world, needed=True),
    Step("CPU group (gloo)", cpu_group, needed=True),
    Step("pynccl communicator and one reduction", pynccl),
    Step("shared memory between ranks", same_node),
    Step("peer access as reported", peer_access),
    Step("legacy IPC with real bytes", legacy_ipc),
    Step("symmetric memory", symmetric_memory),
    Step("upstream's custom all-reduce", custom),
    Step("torch's NCCL barrier", nccl_barrier),
    Step("compiling FlashInfer's fused all-reduce", fusion_compile),
    Step("FlashInfer's exchange of handles", descriptor_exchange),
    Step("FlashInfer's fused workspace", fusion_workspace),
    Step("one-shot preflight", one_shot),
)
