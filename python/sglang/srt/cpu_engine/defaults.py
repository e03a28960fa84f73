"""Defaults for serving on a CPU: set only what the user left open, and say what was set."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

__all__ = ["announce", "environment_defaults", "pool_tokens", "refuses_paged_trees", "server_defaults"]

logger = logging.getLogger("sglang.fork.cpu")

#: KV slots of a server that was not told how many. Upstream sizes the pool to fill most of the memory, which on a CPU
#: is touched at once: half a minute and 12 GiB for a model of a few MB.
POOL_TOKENS = 32768

_set: dict[str, str] = {}


def usable_cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_defaults(
    environment: MutableMapping[str, str], *, compile_wanted: bool, cpus: int
) -> dict[str, str]:
    """Set the variables that decide speed on a CPU; return what was set, with the reason.

    Args:
        environment: changed in place; variables that are present are left alone.
        compile_wanted: the user asked for torch.compile.
        cpus: CPUs this process may run on.
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
        environment_defaults(os.environ, compile_wanted=args.enable_torch_compile, cpus=usable_cpus())
    )
    sys.dont_write_bytecode = False
    if _set:
        settings = "; ".join(f"{setting} ({reason})" for setting, reason in _set.items())
        logger.info("CPU defaults, each yours to set: %s", settings)
        _set.clear()
    return result
