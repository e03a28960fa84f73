"""Upstream's groups as a server's ranks have them, for the bench and the start probe.

Upstream's custom all-reduce asks its group of all ranks for a barrier, and the peer access of every pair. A server
has made that group before, and takes peer access for granted unless ``--enable-p2p-check`` is given
(distributed/bootstrap.py). Without both, the custom all-reduce refuses every machine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

#: Where upstream says why a communicator is off.
LOGGER = "sglang.srt.distributed"


def as_a_server(rank: int, size: int, local_rank: int, address: str, backend: str) -> Any:
    """Make what a server's ranks have before any communicator: peer access taken for granted, and the group of all.

    Args:
        rank, size: of this process and of all.
        local_rank: GPU of this rank.
        address: where ranks meet, if torch's default group is not there yet; else it stays as it is.
        backend: ``nccl`` or, on a processor, ``gloo``.

    Returns:
        upstream's group of all ranks.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.utils.common import monkey_patch_p2p_access_check

    monkey_patch_p2p_access_check()
    parallel_state.init_distributed_environment(
        world_size=size, rank=rank, distributed_init_method=address, local_rank=local_rank, backend=backend
    )
    return parallel_state.get_world_group()


class _Said(logging.Handler):
    """What upstream logs, as texts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def coordinator(ranks: int, local_rank: int, backend: str, custom: bool) -> tuple[Any, str]:
    """A group like that of a server's tensor-parallel ranks; its name keeps our hooks from taking it over. Collective.

    Args:
        ranks: number of them.
        local_rank: GPU of this rank.
        backend: ``nccl`` or ``gloo``.
        custom: with upstream's custom all-reduce.

    Returns:
        the group, and why its custom all-reduce is off, in upstream's words ("" where it is on or was not asked for).
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    said, logger = _Said(), logging.getLogger(LOGGER)
    logger.addHandler(said)
    try:
        made = GroupCoordinator(
            group_ranks=[list(range(ranks))],
            local_rank=local_rank,
            torch_distributed_backend=backend,
            use_pynccl=backend == "nccl",
            use_pymscclpp=False,
            use_custom_allreduce=custom,
            use_torch_symm_mem_all_reduce=False,
            use_hpu_communicator=False,
            use_xpu_communicator=False,
            use_npu_communicator=False,
            group_name="bench_custom" if custom else "bench_nccl",
        )
    finally:
        logger.removeHandler(said)
    if not custom or (made.ca_comm is not None and not made.ca_comm.disabled):
        return made, ""
    return made, refusal(said.texts)


def refusal(texts: Sequence[str]) -> str:
    """One line from what upstream logged while it made a communicator that is off."""
    words = "; ".join(dict.fromkeys(" ".join(text.split()) for text in texts))
    return f"upstream's custom all-reduce is off: {words[:300] or 'without a word of why'}"
