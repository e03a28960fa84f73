"""Grammar mask and logit bias on the rows of a verify, in the order of plain decoding."""

from __future__ import annotations

from typing import Any

import torch


def apply_bias(logits: torch.Tensor, info: Any, rows: int, grammar_mask: Any) -> None:
    """Mask, then bias, in place.

    Args:
        logits: ``[B * rows, V]``.
        info: upstream's sampling info; its ``logit_bias`` is ``[B, V]`` or None.
        rows: verify rows per request.
        grammar_mask: upstream's mask object for all rows, or None.
    """
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.view(-1, rows, logits.shape[-1]).add_(info.logit_bias.unsqueeze(1))
