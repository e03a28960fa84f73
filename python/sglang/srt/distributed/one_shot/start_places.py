"""Every place where upstream's start of several ranks can stand still, and how its stack tells which one it is.

In the order of a start of 0.5.17 with a DeepSeek-type model. A place is known by frames: each sign is a function, or a
file and a function, and all signs of a place are in the stack, outermost first. Of the places whose signs are there,
the one that reaches farthest in decides: the frames above it only led there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NO_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"
NO_CUSTOM = "--disable-custom-all-reduce"
NCCL_PATHS = "NCCL_CUMEM_ENABLE=1 (upstream sets 0), then NCCL_P2P_DISABLE=1"


@dataclass(frozen=True)
class Place:
    """A call that may block.

    Attributes:
        name: what it is.
        waits_for: in words, behind "waits for" or as a sentence of its own.
        switch: what starts without it, or changes it; "" if nothing does.
        signs: ``function`` or ``file:function``, outermost first.
    """

    name: str
    waits_for: str
    switch: str
    signs: tuple[str, ...]


PLACES = (
    Place(
        "process group",
        "the other ranks, to meet at the store",
        "--dist-init-addr, and a firewall that lets ranks meet",
        ("init_process_group",),
    ),
    Place(
        "groups of the ranks",
        "gloo connects the ranks: the machine's own name, or an interface that they do not share",
        "GLOO_SOCKET_IFNAME, and the name in /etc/hosts",
        ("new_group",),
    ),
    Place(
        "pynccl's communicator",
        "NCCL connects the ranks (upstream's own communicator)",
        NCCL_PATHS,
        ("pynccl.py:__init__", "ncclCommInitRank"),
    ),
    Place(
        "pynccl's first reduction",
        "NCCL's first reduction is on the GPU and does not end: the path between the GPUs",
        "NCCL_P2P_DISABLE=1",
        ("pynccl.py:__init__", "synchronize"),
    ),
    Place(
        "shared memory between ranks",
        "the other ranks, while upstream finds out which share a machine",
        "room in /dev/shm",
        ("in_the_same_node_as",),
    ),
    Place(
        "peer-access check",
        "a child process that copies between two GPUs; if one cannot export its memory, the other waits for ever",
        "leave out --enable-p2p-check",
        ("gpu_p2p_access_check",),
    ),
    Place(
        "symmetric memory",
        "ranks exchange symmetric memory, and may bind an NVLink multicast",
        f"TORCH_SYMM_MEM_DISABLE_MULTICAST=1, or {NO_CUSTOM}",
        ("_allocate_symmetric_memory",),
    ),
    Place(
        "custom all-reduce, set-up",
        "the other ranks or the GPU, while the custom all-reduce is set up",
        NO_CUSTOM,
        ("custom_all_reduce_v2.py:_init_workspace",),
    ),
    Place(
        "custom all-reduce, legacy IPC",
        "ranks exchange CUDA IPC handles for the custom all-reduce",
        NO_CUSTOM,
        ("custom_all_reduce.py:create_shared_buffer",),
    ),
    Place(
        "compiling the custom all-reduce",
        "upstream compiles or loads a kernel of its own, or waits for a rank that does",
        NO_CUSTOM,
        ("load_jit",),
    ),
    Place(
        "loaded weights",
        "a rank that has not loaded its weights yet",
        "",
        ("monitored_barrier",),
    ),
    Place(
        "FlashInfer's workspace, vote",
        "the other ranks' vote whether the memory can be had",
        NO_FUSION,
        ("_preflight_check_workspace_memory",),
    ),
    Place(
        "FlashInfer's workspace, first NCCL barrier",
        "torch's own NCCL communicator, which is made at this barrier",
        f"{NCCL_PATHS}; {NO_FUSION}",
        ("mnnvl.py:allgather", "barrier"),
    ),
    Place(
        "FlashInfer's workspace, handles",
        "another rank's memory handle on a Unix socket, which has no time limit",
        NO_FUSION,
        ("recv_fd",),
    ),
    Place(
        "FlashInfer's workspace, mapping",
        "the driver, to map another rank's memory",
        NO_FUSION,
        ("mnnvl.py:_allocate_unicast_buffers",),
    ),
    Place(
        "FlashInfer's workspace, multicast",
        "an NVLink multicast object, which needs the fabric manager (SM100; never on SM90)",
        f"--flashinfer-allreduce-fusion-backend trtllm, or {NO_FUSION}",
        ("mnnvl.py:_setup_multicast",),
    ),
    Place(
        "compiling FlashInfer's all-reduce",
        "FlashInfer builds or loads a compiled module, or waits at a file lock for a rank that does",
        f"let it end once (minutes), or {NO_FUSION}",
        ("build_and_load",),
    ),
    Place(
        "FlashInfer's workspace, clearing",
        "the GPU, to clear FlashInfer's buffers",
        NO_FUSION,
        ("trtllm_create_ipc_workspace_for_all_reduce_fusion", "synchronize"),
    ),
    Place(
        "FlashInfer's workspace, agreement",
        "the other ranks, to agree on whether it is used",
        NO_FUSION,
        ("_sync_allreduce_unavailable_across_tp",),
    ),
    Place(
        "FlashInfer's autotuning",
        "FlashInfer times its kernels",
        "--disable-flashinfer-autotune",
        ("_flashinfer_autotune",),
    ),
    Place(
        "graph capture",
        "the other ranks, in the middle of a graph capture: look for a rank that failed in it",
        "--disable-cuda-graph tells whether it is the capture",
        ("_capture_one_stream",),
    ),
    Place(
        "handles of captured buffers",
        "ranks exchange the buffers that their graphs reduce",
        NO_CUSTOM,
        ("_register_graph_inputs",),
    ),
    Place(
        "all-reduce preflight",
        "the fork's own preflight, which is bounded",
        "SGLANG_FORK_ALL_REDUCE=off",
        ("preflight.py:run",),
    ),
)


def identify(stack: Sequence[str]) -> Place | None:
    """The place where a stack stands, None if no sign is in it.

    Args:
        stack: lines of ``traceback.format_stack`` or of ``faulthandler``, outermost frame first.
    """
    frames = frames_of(stack)
    best: tuple[int, int, Place] | None = None
    for place in PLACES:
        at = _reach(frames, place.signs)
        if at >= 0 and (best is None or (at, len(place.signs)) > best[:2]):
            best = (at, len(place.signs), place)
    return best[2] if best else None


def _reach(frames: Sequence[tuple[str, str]], signs: Sequence[str]) -> int:
    """Index of the innermost frame that the last sign can have, with the others above it in order; -1 if not there."""
    at = -1
    for number, sign in enumerate(signs):
        file, _, function = sign.rpartition(":")
        fitting = [
            index
            for index, (path, name) in enumerate(frames)
            if index > at and name == function and (not file or path.endswith(f"/{file}") or path == file)
        ]
        if not fitting:
            return -1
        at = fitting[-1] if number == len(signs) - 1 else fitting[0]
    return at


#: ``File "x.py", line 3, in f`` of both printers.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+,? in (?P<function>[^\s]+)')


def frames_of(stack: Sequence[str]) -> list[tuple[str, str]]:
    """(file, function) of each frame in the lines, in their order."""
    found = (_FRAME.search(line) for line in stack)
    return [(match["file"], match["function"]) for match in found if match]


def of_dump(text: str) -> list[list[str]]:
    """The stacks in a dump of ``faulthandler``, one a thread, each outermost frame first as ``identify`` wants it."""
    stacks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            stacks.append([])
        elif stacks and _FRAME.search(line):
            stacks[-1].insert(0, line)  # the most recent call comes first there
    return [stack for stack in stacks if stack]
