"""Topic ``run-grammar``: grammar masks on a machine without a GPU.

Upstream allocates every bitmask in pinned memory, which needs a driver, and applies it by a Triton kernel, so
the first constrained request ends the scheduler of a CPU server, with speculation or without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WORD = 32


def allocate(original: Callable[[int, int], torch.Tensor], vocab_size: int, batch_size: int) -> torch.Tensor:
    """Around the allocation of a bitmask: int32 ``[batch, ceil(vocab / 32)]``, everything allowed."""
    if torch.cuda.is_available():
        return original(vocab_size, batch_size)
    return torch.full((batch_size, -(-vocab_size // _WORD)), -1, dtype=torch.int32)


def apply(
    original: Callable[..., None], grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """Around the application of a bitmask, in place."""
    if logits.device.type == "cpu":
        mask_logits(logits, vocab_mask)
    else:
        original(grammar, logits, vocab_mask)


def mask_logits(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set every column whose bit is 0 to -inf, in place.

    Args:
        logits: ``[R, V]``.
        bitmask: int32 ``[R, W]``; bit ``b`` of word ``w`` is column ``32 w + b``. Columns beyond the mask are
            forbidden: no grammar can allow them.
    """
    bits = (bitmask.unsqueeze(-1) >> torch.arange(_WORD, dtype=torch.int32)) & 1
    allowed = bits.flatten(1).bool()[:, : logits.shape[-1]]
    logits[:, : allowed.shape[-1]].masked_fill_(~allowed, float("-inf"))
    logits[:, allowed.shape[-1] :] = float("-inf")
