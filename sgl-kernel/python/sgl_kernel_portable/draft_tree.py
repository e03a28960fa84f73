"""The draft tree: from scored candidates to a mask, positions and links, and the greedy walk through it.

A request's tree has T = `draft_token_num` nodes. Node 0 is the bonus token (the last token the target
accepted); node i >= 1 is the i-th selected draft token. Links are the first child and the next sibling of a
node, -1 where there is none. Global node number = request * T + node.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu"]

FULL_MASK = 0
QLEN_ONLY = 1


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Return each node's parent, int64 [bs, T], with 0 for the root itself.

    A selected score index s belongs to expansion s // topk; expansion 0 grew from the root, and expansion
    e >= 1 grew from the candidate whose score index is `parent_list[e]`.
    """
    bs, drafted = selected_index.shape
    parent = torch.zeros(bs, drafted + 1, dtype=torch.int64)
    if drafted == 0:
        return parent
    expansion = selected_index.to(torch.int64) // topk
    deeper = expansion > 0
    if not bool(deeper.any()):
        return parent
    grown_from = torch.gather(parent_list.to(torch.int64), 1, expansion.clamp(max=parent_list.shape[1] - 1))
    same = grown_from.unsqueeze(2) == selected_index.to(torch.int64).unsqueeze(1)
    place = same.to(torch.int8).argmax(dim=2)
    earlier = torch.arange(drafted).expand(bs, drafted)
    broken = deeper & (~same.any(dim=2) | (place >= earlier) | (expansion >= parent_list.shape[1]))
    if bool(broken.any()):
        request, node = broken.nonzero()[0].tolist()
        raise ValueError(
            f"build_tree_kernel_efficient_cpu: node {node + 1} of request {request} (score index "
            f"{int(selected_index[request, node])}) has no earlier selected parent; selected indices "
            f"{selected_index[request].tolist()}, parent list {parent_list[request].tolist()}, topk {topk}"
        )
    parent[:, 1:] = torch.where(deeper, place + 1, 0)
    return parent


def _grow(parent: Tensor, next_token: Tensor, next_sibling: Tensor) -> tuple[Tensor, Tensor]:
    """Fill the links of trees given by each node's parent; return depths [bs, T] and what each node sees."""
    bs, width = parent.shape
    level = torch.zeros(bs, width, dtype=torch.int64)
    visible = torch.eye(width, dtype=torch.bool).repeat(bs, 1, 1)
    request = torch.arange(bs)
    for node in range(1, width):
        above = parent[:, node]
        level[:, node] = level[request, above] + 1
        visible[:, node] |= visible[request, above]
    # From the last node down, so that the first child of a node ends up being its smallest.
    for node in range(width - 1, 0, -1):
        above = parent[:, node]
        next_sibling[:, node] = next_token[request, above]
        next_token[request, above] = node
    return level, visible


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill the verify inputs of a batch of draft trees.

    Args:
        parent_list: int64 [bs, P], score index of the candidate each expansion grew from.
        selected_index: int64 [bs, T - 1], ascending score indices of the drafted nodes.
        verified_seq_len: int64 [bs], tokens before the tree.
        tree_mask: bool, written. Mode 1 (query only): T * T cells a request. Mode 0 (full): T rows of
            `verified_seq_len + T` cells a request; the prefix columns are the caller's (set to True).
        positions: int64 [bs * T], written: sequence length + depth of the node.
        retrive_index, retrive_next_token, retrive_next_sibling: int64 [bs, T], written; the two link
            tables arrive filled with -1.
        topk: candidates an expansion.
        depth: unused here; the links say how deep a tree is.
        draft_token_num: T.
        tree_mask_mode: 0 or 1. The packed mode (2) has no reader on a CPU.

    Raises:
        NotImplementedError: packed mask mode.
        ValueError: a node without a selected parent, or a mask of the wrong size.
    """
    del depth
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"build_tree_kernel_efficient_cpu: tree mask mode {tree_mask_mode} is packed bits, which no CPU "
            "attention reads; use mode 0 (full) or 1 (query only)"
        )
    bs = verified_seq_len.numel()
    width = draft_token_num
    if topk == 1:
        # One candidate an expansion: node i grew from node i - 1, whatever the scores.
        level = torch.arange(width).expand(bs, width)
        visible = torch.ones(width, width, dtype=torch.bool).tril_().expand(bs, width, width)
        retrive_next_token[:, :-1] = torch.arange(1, width)
    else:
        parent = _parents(parent_list, selected_index, topk)
        level, visible = _grow(parent, retrive_next_token, retrive_next_sibling)
    retrive_index.copy_(torch.arange(bs * width).view(bs, width))
    positions.copy_((verified_seq_len.to(torch.int64).unsqueeze(1) + level).flatten())

    if tree_mask_mode == QLEN_ONLY:
        if tree_mask.numel() < bs * width * width:
            raise ValueError(
                f"build_tree_kernel_efficient_cpu: mask of {tree_mask.numel()} cells, "
                f"{bs} requests of {width} nodes need {bs * width * width}"
            )
        tree_mask.view(-1)[: bs * width * width] = visible.reshape(-1)
        return
    needed = width * (int(verified_seq_len.sum()) + width * bs)
    if tree_mask.numel() < needed:
        raise ValueError(
            f"build_tree_kernel_efficient_cpu: mask of {tree_mask.numel()} cells, needs {needed}"
        )
    offset = 0
    for i, seq_len in enumerate(verified_seq_len.tolist()):
        cells = width * (seq_len + width)
        tree_mask.view(-1)[offset : offset + cells].view(width, seq_len + width)[:, seq_len:] = visible[i]
        offset += cells


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree along the target's greedy choices.

    From the root, take the child whose token is the target's argmax after the last accepted node, until no
    child matches or `accept_index` is full.

    Args:
        predicts: int32 [bs * T], written at the accepted nodes: the token that follows each.
        accept_index: int32 [bs, S], arrives filled with -1; written with accepted global node numbers.
        accept_token_num: int32 [bs], written: accepted drafts, the bonus token not counted.
        candidates: int64 [bs, T], token of each node.
        retrive_index, retrive_next_token, retrive_next_sibling: int64 [bs, T].
        target_predict: int64 [bs, T], the target's argmax after each node.
    """
    slots = accept_index.shape[1]
    choice = target_predict.flatten().tolist()
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    # Plain lists: a few integers a request, for which one tensor operation costs more than the whole walk.
    walked: list[list[int]] = []
    for token, global_number, child, sibling in rows:
        accepted = [global_number[0]]
        node = 0
        while len(accepted) < slots:
            node = child[node]
            while node != -1 and token[node] != choice[accepted[-1]]:
                node = sibling[node]
            if node == -1:
                break
            accepted.append(global_number[node])
        walked.append(accepted)
    if not walked:
        return
    accept_index.copy_(torch.tensor([path + [-1] * (slots - len(path)) for path in walked]))
    accept_token_num.copy_(torch.tensor([len(path) - 1 for path in walked]))
    index = torch.tensor([node for path in walked for node in path])
    predicts[index] = target_predict.reshape(-1)[index].to(predicts.dtype)
