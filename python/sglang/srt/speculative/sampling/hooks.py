"""Rejection sampling in a verify on the CPU, where upstream's rule is a GPU kernel."""

from __future__ import annotations

from typing import Any

import torch
from sglang.fork import fallbacks
from sglang.srt.speculative.sampling.filters import filtered_probabilities
from sglang.srt.speculative.sampling.rejection import verify_chain
from torch import Tensor

__all__ = ["rejection_verify", "usable_proposal"]


def usable_proposal(verify_input: Any, vocabulary: int, seeded: bool) -> bool:
    """Return whether the drafts come with the distribution they were drawn from, over the target's vocabulary.

    Requests with a seed are not for rejection either: drafts are drawn without it, so only draws from the target repeat.

    If not, the caller draws from the target and accepts the drafts that agree: the same output distribution, with
    shorter runs. That is counted as a fallback.
    """
    proposal = verify_input.draft_probs
    if verify_input.tree_topk != 1:
        reason = "the drafts form a tree"
    elif proposal is None:
        reason = "the draft worker gives no distribution"
    elif proposal.shape[-1] != vocabulary:
        reason = "the draft has another vocabulary than the target"
    elif seeded:
        reason = "a request has a seed"
    else:
        return True
    fallbacks.record(
        "rejection sampling", reason, detail="drafts are accepted where they equal the target's draw"
    )
    return False


def rejection_verify(verify_input: Any, logits: Tensor, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Accept along chains by rejection.

    Args:
        verify_input: upstream's verify input of `bs` chains of T nodes.
        logits: target logits with penalties and masks applied, [bs * T, vocabulary].
        rows: sampling parameters repeated for every row, under upstream's names.

    Returns:
        Predicted ids int32 [bs * T], accept lengths with the bonus token int32 [bs], accepted nodes int32 [bs, T].
    """
    width = verify_input.draft_token_num
    candidates = verify_input.draft_token.reshape(-1, width)
    bs = candidates.shape[0]
    target = filtered_probabilities(logits, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)
    drafts = candidates[:, 1:].to(torch.int64)
    coins = torch.rand(bs, width, device=logits.device)
    accepted, token = verify_chain(
        target.view(bs, width, -1), verify_input.draft_probs, drafts, coins[:, 1:], coins[:, 0]
    )
    node = torch.arange(width, device=logits.device)
    # What follows node i is draft i + 1 while that was accepted, and the new token after the last one.
    predicted = torch.zeros(bs, width, dtype=torch.int32, device=logits.device)
    predicted[:, :-1] = torch.where(node[:-1] < accepted.unsqueeze(1), drafts, 0).to(torch.int32)
    predicted[torch.arange(bs, device=logits.device), accepted] = token.to(torch.int32)
    index = torch.where(node <= accepted.unsqueeze(1), verify_input.retrieve_index.view(bs, width), -1)
    return predicted.flatten(), (accepted + 1).to(torch.int32), index.to(torch.int32)
