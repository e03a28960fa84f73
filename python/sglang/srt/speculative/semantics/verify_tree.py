"""Which candidates precede each row of a verify, as a mask on the device."""

from __future__ import annotations

from typing import Any

import torch


def candidate_mask(verify_input: Any, device: torch.device | str) -> torch.Tensor:
    """Ancestors of each row, bool ``[B or 1, T, T]``; a chain needs no look at the tree."""
    if verify_input.tree_topk == 1:
        return chain_mask(verify_input.draft_token_num, device)
    return ancestor_mask(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)


def chain_mask(rows: int, device: torch.device | str) -> torch.Tensor:
    """Ancestors in a chain, self included: bool ``[1, rows, rows]``, lower triangular."""
    return torch.ones((rows, rows), dtype=torch.bool, device=device).tril().unsqueeze(0)


def ancestor_mask(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Ancestors in draft trees given as first-child / next-sibling lists, self included.

    Args:
        next_token: int ``[B, T]``, the first child of each node or -1.
        next_sibling: int ``[B, T]``, the next node with the same parent or -1.

    Returns:
        bool ``[B, T, T]``; ``[b, t, j]`` says that node ``j`` is ``t`` or an ancestor of ``t``.

    A parent always has a smaller index than its children and siblings appear in index order, so one pass
    over the nodes sees each parent's row complete. The pass is ``T`` steps of device work without a sync.
    """
    batch, rows = next_token.shape
    device = next_token.device
    # Column ``rows`` is a bin for links that do not exist; it is cut off at the end.
    mask = torch.zeros((batch, rows + 1, rows), dtype=torch.bool, device=device)
    mask[:, 0, 0] = True
    index = torch.arange(rows, device=device)
    every = torch.arange(batch, device=device)
    child = torch.where(next_token < 0, rows, next_token).long()
    sibling = torch.where(next_sibling < 0, rows, next_sibling).long()
    for node in range(rows):
        here = mask[:, node]
        own = index == node
        mask[every, child[:, node]] = here | (index == child[:, node : node + 1])
        mask[every, sibling[:, node]] = (here & ~own) | (index == sibling[:, node : node + 1])
    return mask[:, :rows]


def repeats(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How often each candidate's token occurs among each row's ancestors.

    Args:
        tokens: int ``[B, T]``, the candidates.
        mask: bool ``[B or 1, T, T]`` from ``chain_mask`` or ``ancestor_mask``.

    Returns:
        int64 ``[B, T, T]``; ``[b, t, j]`` counts the ``k`` with ``mask[b, t, k]`` and
        ``tokens[b, k] == tokens[b, j]``. Equal tokens therefore carry equal counts, so a scatter over ``j``
        may write a token twice and still be deterministic.
    """
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).float()
    counted = mask.float().expand(tokens.shape[0], -1, -1) @ same.transpose(1, 2)
    return counted.round().long()
