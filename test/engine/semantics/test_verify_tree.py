"""Ancestors of rows, against a walk over parents."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative.semantics.verify_tree import ancestor_mask, chain_mask, repeats


def links(parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """First-child and next-sibling lists of a tree given by parents (-1 for the root)."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        sibling[node], child[parents[node]] = child[parents[node]], node
    return torch.tensor([child]), torch.tensor([sibling])


def walk(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        at = node
        while at >= 0:
            mask[node, at] = True
            at = parents[at]
    return mask


TREES = [
    [-1],
    [-1, 0],
    [-1, 0, 1],
    [-1, 0, 0],
    [-1, 0, 0, 1, 1, 2],
    [-1, 0, 0, 0, 3, 3, 4],
    [-1, 0, 1, 2, 3, 4, 5],
]


@pytest.mark.parametrize("parents", TREES)
def test_ancestors(parents: list[int]) -> None:
    assert torch.equal(ancestor_mask(*links(parents))[0], walk(parents))


def test_batch_of_trees() -> None:
    first, second = [-1, 0, 0, 1, 2], [-1, 0, 1, 1, 3]
    child, sibling = (torch.cat(pair) for pair in zip(links(first), links(second), strict=True))
    assert torch.equal(ancestor_mask(child, sibling), torch.stack([walk(first), walk(second)]))


def test_chain_is_the_tree_of_single_children() -> None:
    for rows in range(1, 6):
        assert torch.equal(chain_mask(rows, "cpu")[0], walk(list(range(-1, rows - 1))))


def test_repeats_count_equal_ancestors() -> None:
    tokens = torch.tensor([[7, 3, 7, 7]])
    counts = repeats(tokens, chain_mask(4, "cpu"))
    assert counts[0].tolist() == [[1, 0, 1, 1], [1, 1, 1, 1], [2, 1, 2, 2], [3, 1, 3, 3]]
