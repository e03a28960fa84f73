"""``--speculative-verify-graph``: what it asks of the other options, checked before weights load."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.arguments.faults import ArgumentFault
from sglang.srt.speculative.graph_policy.sizes import Gap, clamp, find_gap, grow

logger = logging.getLogger("sglang.fork.graphs")

FLAG = "--speculative-verify-graph"
AUTO, REQUIRE, OFF = "auto", "require", "off"
MODES = (AUTO, REQUIRE, OFF)
BACKEND_FLAG = "--cuda-graph-backend-decode"


@dataclass(frozen=True)
class Setup:
    """Resolved options that decide whether every verify can replay.

    Attributes:
        mode: ``auto``, ``require`` or ``off``.
        speculates: whether a speculative algorithm is set.
        device: device type.
        backend: resolved backend of the decode graphs (``disabled`` when there are none).
        sizes: capture sizes asked for.
        most_running: most requests a rank runs at once; None while only the memory decides.
        padding: whether a batch may be padded up to a captured size.
        dp_attention: data-parallel attention, where one rank that prefills forces all others off their graphs.
        two_batch: two-batch overlap, which splits batches that a graph may not fit.
    """

    mode: str
    speculates: bool
    device: str
    backend: str
    sizes: tuple[int, ...]
    most_running: int | None
    padding: bool = True
    dp_attention: bool = False
    two_batch: bool = False


def refusal(setup: Setup) -> ArgumentFault | None:
    """Why a server that requires its verify graph cannot start; None when it can, or does not require it."""
    if setup.mode not in MODES:
        return ArgumentFault(
            f"{FLAG} {setup.mode}", f"must be one of {', '.join(MODES)}", f"give {FLAG} auto", code="mode"
        )
    if setup.mode != REQUIRE:
        return None
    if not setup.speculates:
        return _refuse(
            "there is nothing to verify", "give --speculative-algorithm or drop the flag", "no-draft"
        )
    if setup.device == "cpu":
        return _refuse("a CPU has no graphs", f"give {FLAG} auto", "cpu")
    if setup.backend == "disabled":
        return _refuse(
            "CUDA graphs are switched off",
            f"drop --disable-cuda-graph or {BACKEND_FLAG}=disabled",
            "disabled",
        )
    if setup.dp_attention:
        return _refuse(
            "with --enable-dp-attention a rank that prefills forces the others to run eager",
            f"drop --enable-dp-attention or give {FLAG} auto",
            "dp-attention",
        )
    if setup.two_batch:
        return _refuse(
            "with --enable-two-batch-overlap a batch that cannot be split runs eager",
            f"drop --enable-two-batch-overlap or give {FLAG} auto",
            "two-batch",
        )
    gap = gap_of(setup)
    return None if gap is None else _refuse(gap.text(), f"or give {FLAG} auto", "gap")


def gap_of(setup: Setup) -> Gap | None:
    """Batches that can run and that no graph would serve; None while the memory decides how many run."""
    if setup.most_running is None or not setup.sizes or setup.backend == "disabled":
        return None
    return find_gap(setup.sizes, setup.most_running, padding=setup.padding)


def grown(setup: Setup, *, chosen: bool) -> tuple[int, ...] | None:
    """The sizes that close a gap; None when there is none, or when the user chose the sizes."""
    if chosen or setup.mode == OFF or not setup.speculates or gap_of(setup) is None:
        return None
    assert setup.most_running is not None
    return grow(setup.sizes, setup.most_running, padding=setup.padding)


def _refuse(limit: str, remedy: str, code: str) -> ArgumentFault:
    return ArgumentFault(f"{FLAG} require", f"cannot be kept: {limit}", remedy, code=f"verify-graph-{code}")


def setup_of(args: Any) -> Setup:
    """Read resolved ``ServerArgs``."""
    decode = getattr(args.cuda_graph_config, "decode", None)
    most = args.max_running_requests
    replicas = int(args.dp_size) if args.enable_dp_attention else 1
    return Setup(
        mode=str(args.speculative_verify_graph),
        speculates=args.speculative_algorithm is not None,
        device=str(args.device or "cuda").split(":")[0],
        backend=str(getattr(decode, "backend", "disabled")),
        sizes=tuple(sorted(getattr(decode, "bs", None) or ())),
        most_running=max(int(most) // max(replicas, 1), 1) if most else None,
        padding=not args.disable_cuda_graph_padding,
        dp_attention=bool(args.enable_dp_attention),
        two_batch=bool(args.enable_two_batch_overlap),
    )


def check(args: Any) -> None:
    """Refuse, widen or remark, once ``args`` are resolved.

    Raises:
        ArgumentFault: the policy is ``require`` and cannot be kept.
    """
    setup = setup_of(args)
    locked: set[tuple[str, str]] = getattr(args, "_cuda_graph_config_locked", set())
    sizes = grown(setup, chosen=bool({("decode", "bs"), ("decode", "max_bs")} & locked))
    if sizes is not None and setup.device != "cpu":
        decode = args.cuda_graph_config.decode
        decode.bs, decode.max_bs = list(sizes), sizes[-1]
        logger.info(
            "graphs are captured up to batch %d, the most that run at once (the default for this GPU ends at %d); "
            "--cuda-graph-max-bs-decode sets another limit",
            sizes[-1],
            setup.sizes[-1],
        )
        setup = setup_of(args)
    fault = refusal(setup)
    if fault is not None:
        raise fault
    if not setup.speculates:
        if setup.mode != AUTO:
            logger.warning("%s %s has no effect without --speculative-algorithm", FLAG, setup.mode)
        return
    gap = gap_of(setup)
    if gap is not None and setup.mode == AUTO and setup.device != "cpu":
        logger.warning("%s; these steps will run eager and be counted", gap.text())


def captured_sizes(setup: Setup) -> tuple[int, ...]:
    """The sizes as they will be captured."""
    return clamp(setup.sizes, setup.most_running) if setup.most_running else setup.sizes
