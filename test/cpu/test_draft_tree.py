"""Trees are built and walked as a recursive model of them says; chains are trees of topk 1."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel_portable import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from torch import Tensor


@dataclass
class Tree:
    """A request's tree as a draft produces it: who grew from whom, in score order."""

    parent_list: list[int]
    selected: list[int]
    parents: list[int]


@st.composite
def trees(draw: st.DrawFn, topk: int, steps: int, width: int) -> Tree:
    """Grow a full candidate tree, then select `width` - 1 nodes so that parents are always selected.

    Score index of candidate c of expansion e is e * topk + c. Expansion 0 grows from the root; each later step
    expands topk candidates of the step before.
    """
    parent_list = [-1]
    level = [0 * topk + c for c in range(topk)]
    everything = list(level)
    parent_of: dict[int, int] = {}
    expansion = 1
    for _ in range(steps - 1):
        chosen = sorted(draw(st.permutations(level))[:topk])
        grown = []
        for candidate in chosen:
            parent_list.append(candidate)
            for c in range(topk):
                grown.append(expansion * topk + c)
                parent_of[expansion * topk + c] = candidate
            expansion += 1
        everything += grown
        level = grown
    selected: list[int] = []
    while len(selected) < width - 1:
        open_nodes = [
            node
            for node in everything
            if node not in selected and (node not in parent_of or parent_of[node] in selected)
        ]
        selected.append(draw(st.sampled_from(open_nodes)))
    selected.sort()
    parents = [-1] + [0 if s not in parent_of else 1 + selected.index(parent_of[s]) for s in selected]
    return Tree(parent_list, selected, parents)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int, list[Tree], list[int]]:
    """Batches of chains (topk 1) and of trees."""
    topk = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 3))
    candidates = topk + (steps - 1) * topk * topk
    width = draw(st.integers(2, min(candidates, 8) + 1)) if topk > 1 else steps + 1
    count = draw(st.integers(1, 3))
    forest = [draw(trees(topk, steps, width)) for _ in range(count)]
    return topk, steps, width, forest, [draw(st.integers(0, 9)) for _ in range(count)]


def build(
    topk: int, steps: int, width: int, forest: list[Tree], seq_lens: list[int], mode: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bs = len(forest)
    cells = bs * width * width if mode == 1 else width * (sum(seq_lens) + width * bs)
    mask = torch.full((cells + 5,), True)
    positions = torch.empty(bs * width, dtype=torch.int64)
    links = torch.full((3, bs, width), -1, dtype=torch.int64)
    build_tree_kernel_efficient_cpu(
        torch.tensor([tree.parent_list for tree in forest]).view(bs, -1),
        torch.tensor([tree.selected for tree in forest]).view(bs, width - 1),
        torch.tensor(seq_lens),
        mask,
        positions,
        links[0],
        links[1],
        links[2],
        topk,
        steps,
        width,
        mode,
    )
    assert mask[cells:].all()
    return mask[:cells], positions, links[0], links[1], links[2]


def ancestors(tree: Tree, node: int) -> list[int]:
    """The node and what is above it, root last."""
    path = [node]
    while tree.parents[path[-1]] != -1:
        path.append(tree.parents[path[-1]])
    return path


@settings(deadline=None)
@given(batches())
def test_links_positions_and_masks(case: tuple[int, int, int, list[Tree], list[int]]) -> None:
    topk, steps, width, forest, seq_lens = case
    mask, positions, index, child, sibling = build(topk, steps, width, forest, seq_lens, mode=1)
    full, *_ = build(topk, steps, width, forest, seq_lens, mode=0)
    assert index.flatten().tolist() == list(range(len(forest) * width))
    offset = 0
    for b, tree in enumerate(forest):
        square = mask.view(len(forest), width, width)[b]
        cells = width * (seq_lens[b] + width)
        rows = full[offset : offset + cells].view(width, -1)
        offset += cells
        for node in range(width):
            path = ancestors(tree, node)
            seen = [column in path for column in range(width)]
            assert square[node].tolist() == seen
            assert rows[node].tolist() == [True] * seq_lens[b] + seen
            assert int(positions[b * width + node]) == seq_lens[b] + len(path) - 1
            children = [i for i in range(width) if tree.parents[i] == node]
            listed, cursor = [], int(child[b, node])
            while cursor != -1:
                listed.append(cursor)
                cursor = int(sibling[b, cursor])
            assert listed == children


@settings(deadline=None)
@given(batches(), st.data())
def test_the_walk_follows_the_target(
    case: tuple[int, int, int, list[Tree], list[int]], data: st.DataObject
) -> None:
    topk, steps, width, forest, seq_lens = case
    *_, index, child, sibling = build(topk, steps, width, forest, seq_lens, mode=1)
    bs, slots = len(forest), steps + 1
    # A vocabulary of three makes agreement common, at every depth.
    candidates = [[data.draw(st.integers(0, 2)) for _ in range(width)] for _ in forest]
    target = [[data.draw(st.integers(0, 2)) for _ in range(width)] for _ in forest]
    poison = -77
    predicts = torch.full((bs * width,), poison, dtype=torch.int32)
    accepted = torch.full((bs, slots), -1, dtype=torch.int32)
    count = torch.full((bs,), poison, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor(candidates),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor(target),
    )
    expected_predicts = [poison] * (bs * width)
    for b, tree in enumerate(forest):
        path, node = [0], 0
        while True:
            expected_predicts[b * width + node] = target[b][node]
            matching = [
                i for i in range(width) if tree.parents[i] == node and candidates[b][i] == target[b][node]
            ]
            if not matching or len(path) == slots:
                break
            node = matching[0]
            path.append(node)
        wanted = [b * width + node for node in path]
        assert accepted[b].tolist() == wanted + [-1] * (slots - len(wanted))
        assert int(count[b]) == len(path) - 1
    assert predicts.tolist() == expected_predicts


def test_a_node_without_its_parent_is_named() -> None:
    """Score index 2 grew from candidate 1, which was not selected."""
    with pytest.raises(ValueError, match=r"node 2 of request 0 \(score index 2\)"):
        build(2, 2, 3, [Tree([-1, 1], [0, 2], [])], [4], mode=1)


def test_packed_masks_and_short_masks_are_refused() -> None:
    chain = Tree([-1, 0], [0, 1], [-1, 0, 1])
    with pytest.raises(NotImplementedError, match="packed bits"):
        build(1, 2, 3, [chain], [4], mode=2)
    links = torch.full((3, 1, 3), -1, dtype=torch.int64)
    for mode in (0, 1):
        with pytest.raises(ValueError, match="mask of 5 cells"):
            build_tree_kernel_efficient_cpu(
                torch.tensor([[-1, 0]]),
                torch.tensor([[0, 1]]),
                torch.tensor([4]),
                torch.ones(5, dtype=torch.bool),
                torch.empty(3, dtype=torch.int64),
                *links,
                1,
                2,
                3,
                mode,
            )
