"""What several ranks have to agree on: which sizes run as one graph, and that a draw gives all of them one token.

A draw depends on logits, parameters and the cycle's number alone (``draw_kernel``: sums in a fixed order, variates by a
hash). Parameters and number are the same on every rank, so tokens are where logits are: where each rank holds the
gathered whole of all ranks' parts. A head that every rank computes for itself reads hidden states that its own
all-reduce summed; nothing promises that those agree to the last bit.

A rank that went without a size would take the split path, draw by its own generator there and lose count of the
cycles, so only sizes that every rank has are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Size = tuple[bool, int]


def same_logits(model: Any, ranks: int) -> bool:
    """Whether all ranks of a target hold bitwise equal logits by construction."""
    if ranks == 1:
        return True
    heads = [module for module in model.modules() if hasattr(module, "do_tensor_parallel_all_gather")]
    return bool(heads) and all(
        head.do_tensor_parallel_all_gather and not getattr(head, "use_attn_tp_group", False) for head in heads
    )


def agreed(mine: Iterable[Size], group: Any) -> set[Size]:
    """The sizes that every rank of ``group`` has; every rank must ask.

    Args:
        mine: (whether rows are drawn, batch size) of this rank's graphs.
        group: upstream's group coordinator.
    """
    own = set(mine)
    ranks = int(getattr(group, "world_size", 1) or 1)
    if ranks == 1:
        return own
    found: list[list[Size]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(found, sorted(own), group=group.cpu_group)
    for other in found:
        own &= {(bool(drawn), int(batch)) for drawn, batch in other}
    return own
