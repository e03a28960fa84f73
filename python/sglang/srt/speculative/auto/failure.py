"""A plain step that cannot be launched: either all ranks go on with cycles, or none goes on.

A rank that runs a cycle while the others decode plainly sends and awaits other messages than they do: they would wait for
ever, or add what does not belong together. Ranks that succeeded cannot be asked without a message in every step, so only
those that failed tell each other, through the store and not through a collective, whose turn the others may be in.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from sglang.srt.distributed.one_shot.exchange import Exchange, Silent

#: How long rank 0 waits for the others to fail too, in seconds; those wait for its word a grace longer. Ranks run in step: a
#: mistake in the code meets all at once.
LIMIT_S = 10.0
CURE = "start with --speculative-auto off"


class RanksParted(RuntimeError):
    """A plain step failed on some ranks only, or not at the same place; this rank must not go on."""


def place_of(error: BaseException) -> str:
    """``AttributeError at plain.py:120``: what failing ranks have to have in common to be where the others are."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
    return f"{type(error).__name__} at {where}"


def exchange_of(group: Any) -> Exchange | None:
    """Through which the ranks of ``group`` (upstream's coordinator) tell each other; None for one rank."""
    size = int(getattr(group, "world_size", 1) or 1)
    if size == 1:
        return None
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return Exchange(store, int(group.rank_in_group), size, f"plain-step/{group.unique_name}/{group.ranks}")


def agree(error: BaseException, exchange: Exchange | None, step: int) -> None:
    """Return where all ranks failed in the same step at the same place; once a process, since no plain step follows.

    Args:
        error: what this rank's plain step raised.
        exchange: of the ranks that run it together; None for one rank, which needs nobody's word.
        step: which plain step it was. A rank that launched it may be one ahead when it fails.

    Raises:
        RanksParted: another rank did not fail, or did elsewhere.
    """
    if exchange is None:
        return
    mine = f"{place_of(error)}, plain step {step}"
    try:
        places = exchange.require("a plain step that failed", mine, LIMIT_S)
    except Silent as silent:
        who = ", ".join(map(str, silent.ranks))
        raise RanksParted(
            f"a plain step failed on rank {exchange.rank} ({mine}) and not on rank {who}: the ranks cannot go on "
            f"together; {CURE}"
        ) from error
    if len(set(places)) > 1:
        told = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
        raise RanksParted(
            f"a plain step failed at different places ({told}): the ranks cannot go on; {CURE}"
        ) from error
