"""Defaults for serving on a CPU: set only what the user left open, and say what was set."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "announce",
    "environment_defaults",
    "group_without_nccl",
    "pool_tokens",
    "refuses_paged_trees",
    "server_defaults",
    "threads_of_ranks",
]

logger = logging.getLogger("sglang.fork.cpu")

#: KV slots of a server that was not told how many. Upstream sizes the pool to fill most of the memory, which on a CPU
#: is touched at once: half a minute and 12 GiB for a model of a few MB.
POOL_TOKENS = 32768

_set: dict[str, str] = {}


def usable_cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    """Return the number of memory nodes of this machine, 1 where it is not known."""
    return max(1, len(list(root.glob("node[0-9]*"))))


def threads_of_ranks(cpus: Sequence[int], ranks: int) -> str:
    """Return which CPUs each rank computes on, as upstream's variable has it: lists of a rank, divided by bars.

    Neighbours go to one rank, in shares that differ by one CPU at most; with fewer CPUs than ranks they take turns.
    """
    ordered = sorted(cpus)
    shares = [
        ordered[rank * len(ordered) // ranks : (rank + 1) * len(ordered) // ranks] for rank in range(ranks)
    ]
    if len(ordered) < ranks:
        shares = [[ordered[rank % len(ordered)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def group_without_nccl(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `init_model_parallel_group`: ranks on a CPU get no NCCL communicator and no custom all-reduce.

    Upstream makes one wherever the library is installed, as it is beside any CUDA build of torch, and NCCL then fails
    for want of a GPU. The tests of `use_pynccl` name the platforms that have none, the CPU not among them. The custom
    all-reduce fails too, with a warning that says nothing.
    """
    from sglang.srt.utils import is_cpu

    if is_cpu() and len(args) < 4:
        kwargs.update(use_pynccl=False, use_custom_allreduce=False)
    return original(*args, **kwargs)


def environment_defaults(
    environment: MutableMapping[str, str],
    *,
    compile_wanted: bool,
    cpus: int,
    ranks: int = 1,
    nodes: int = 1,
    which: Sequence[int] = (),
) -> dict[str, str]:
    """Set the variables that decide speed on a CPU; return what was set, with the reason.

    Args:
        environment: changed in place; variables that are present are left alone.
        compile_wanted: the user asked for torch.compile.
        cpus: CPUs this process may run on.
        ranks: tensor-parallel ranks of the server.
        nodes: memory nodes of the machine.
        which: numbers of those CPUs.
    """
    done = {}

    def default(name: str, value: str, reason: str) -> None:
        if name not in environment:
            environment[name] = value
            done[f"{name}={value}"] = reason

    threads = max(1, cpus // 2)
    default(
        "OMP_NUM_THREADS",
        str(threads),
        f"half of {cpus} CPUs: the server is three processes, and waiting OpenMP threads spin",
    )
    if ranks > nodes and which:
        default(
            "SGLANG_CPU_OMP_THREADS_BIND",
            threads_of_ranks(which, ranks),
            f"{ranks} ranks on {nodes} memory node(s): upstream asks for the CPUs of each",
        )
    if not compile_wanted:
        for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
            default(name, "1", "compiling small functions costs up to minutes at the first requests")
    if environment.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
        done["PYTHONDONTWRITEBYTECODE removed"] = "without the byte-code cache a start takes a minute longer"
    return done


def pool_tokens(model_path: str, context_length: int | None) -> int:
    """Return the default number of KV slots: `POOL_TOKENS`, or one full context where that is longer.

    A model that is not a local folder counts as short; upstream still shrinks the pool to the memory there is.
    """
    context = context_length
    if context is None:
        try:
            config = json.loads((Path(model_path) / "config.json").read_text())
            context = config.get("text_config", config).get("max_position_embeddings", 0)
        except (OSError, ValueError, AttributeError):
            context = 0
    return max(POOL_TOKENS, context if isinstance(context, int) else 0)


def server_defaults(original: Callable[[Any], Any], args: Any) -> Any:
    """Around `ServerArgs._handle_missing_default_values`: fill in what a CPU needs.

    Runs before memory is sized and after the device can be known.
    """
    inferred = args.device is None
    result = original(args)
    if args.device != "cpu":
        return result
    if inferred:
        _set["--device cpu"] = "no accelerator was found, or SGLANG_USE_CPU_ENGINE=1"
    if args.max_total_tokens is None:
        args.max_total_tokens = pool_tokens(args.model_path, args.context_length)
        _set[f"--max-total-tokens {args.max_total_tokens}"] = "the pool would otherwise fill the memory"
    return result


def refuses_paged_trees(refused: bool, args: Any) -> bool:
    """Guard of upstream's refusal of topk > 1 with pages of several slots: the CPU's attention has both."""
    return refused and args.device != "cpu"


def announce(original: Callable[[Any], Any], args: Any) -> Any:
    """Around `_set_envs_and_config`: set the environment of the server's processes, and log every default.

    The processes that compute are started after this, and read the environment when they load torch.
    """
    result = original(args)
    if args.device != "cpu":
        return result
    _set.update(
        environment_defaults(
            os.environ,
            compile_wanted=args.enable_torch_compile,
            cpus=usable_cpus(),
            ranks=args.tp_size,
            nodes=numa_nodes(),
            which=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (),
        )
    )
    sys.dont_write_bytecode = False
    if _set:
        settings = "; ".join(f"{setting} ({reason})" for setting, reason in _set.items())
        logger.info("CPU defaults, each yours to set: %s", settings)
        _set.clear()
    return result
