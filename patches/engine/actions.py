"""Changes to single nodes, and the one pass that puts all of a file's changes in.

Anchors are looked up in the pristine tree and keyed by node identity, so no edit can move or hide the
anchor of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from patches.engine.tree import Place

Change = Callable[[Any], cst.CSTNode]


@dataclass(frozen=True)
class Action:
    """One change at one node: rewrite it, or put statements before or after it."""

    place: Place
    rewrite: Change | None = None
    before: tuple[cst.SimpleStatementLine, ...] = ()
    after: tuple[cst.SimpleStatementLine, ...] = ()


class _Applier(cst.CSTTransformer):
    """Applies actions, visiting only nodes that lie above one."""

    def __init__(self, actions: Iterable[Action]) -> None:
        super().__init__()
        self.actions: dict[int, list[Action]] = {}
        self.above: set[int] = set()
        for action in actions:
            self.actions.setdefault(id(action.place.node), []).append(action)
            self.above.update(id(node) for node in action.place.path)

    def on_visit(self, node: cst.CSTNode) -> bool:
        return id(node) in self.above

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: Any
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
        actions = self.actions.get(id(original_node))
        if not actions:
            node: cst.CSTNode = updated_node
            return node
        before: list[cst.CSTNode] = []
        after: list[cst.CSTNode] = []
        for action in actions:
            if action.rewrite is not None:
                updated_node = action.rewrite(updated_node)
            before += action.before
            after += action.after
        if not before and not after:
            node = updated_node
            return node
        return cst.FlattenSentinel([*before, updated_node, *after])


def apply(module: cst.Module, actions: Sequence[Action]) -> cst.Module:
    """The module with all actions put in; ``module`` itself is left alone."""
    if not actions:
        return module
    changed = module.visit(_Applier(actions))
    if not isinstance(changed, cst.Module):  # the module node is never flattened or removed
        raise TypeError("an action removed the module")
    return changed


def marked(topic: str) -> cst.TrailingWhitespace:
    """The trailing comment that names the topic of a changed line."""
    return cst.TrailingWhitespace(
        whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(f"# fork: {topic}"), newline=cst.Newline()
    )


def with_mark(existing: cst.TrailingWhitespace, topic: str) -> cst.TrailingWhitespace:
    """``existing`` with the topic's comment added; upstream's own comment stays in front."""
    mark = f"# fork: {topic}"
    if existing.comment is None:
        return existing.with_changes(whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(mark))
    text = existing.comment.value
    if mark in text:
        return existing
    return existing.with_changes(comment=cst.Comment(f"{text}  {mark}"))


def mark_statement(topic: str) -> Change:
    """A rewrite that marks a statement as changed by ``topic``, at the end of its header or line."""

    def change(node: Any) -> cst.CSTNode:
        if isinstance(node, cst.SimpleStatementLine):
            return node.with_changes(trailing_whitespace=with_mark(node.trailing_whitespace, topic))
        block = getattr(node, "body", None)
        if isinstance(block, cst.IndentedBlock):
            marked_block = block.with_changes(header=with_mark(block.header, topic))
            changed: cst.CSTNode = node.with_changes(body=marked_block)
            return changed
        unmarked: cst.CSTNode = node
        return unmarked

    return change
