"""The greedy continuation of a prompt by transformers: the reference that no part of the server took part in."""

from __future__ import annotations

from typing import Any

import torch


def continuation(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """``tokens`` ids that ``model`` (transformers, on a CPU) puts behind ``prompt``, one at a time and past any end."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]
