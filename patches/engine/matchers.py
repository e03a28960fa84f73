"""What an edit looks for inside its scope, said in names only: no quoted upstream text, no line numbers.

Names are dotted and compared from the right, so ``run`` finds ``self.runner.run``. ``mentions`` narrows a
match to nodes that hold all of these names (or, in quotes, string literals). ``nth`` (counted from 0 in
source order) is for places that names cannot tell apart, and must say why in ``because``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from patches.engine.tree import Place, body, children, dotted, ends_with, mentions


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """Base of all matchers."""

    mentions: tuple[str, ...] = ()
    nth: int | None = None
    because: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.mentions, str):
            raise TypeError("mentions is a tuple of names")
        if (self.nth is None) != (not self.because):
            raise ValueError("nth needs because=..., a reason why names cannot decide, and because needs nth")

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        """Names of ``node`` if it is of this matcher's kind, else None."""
        raise NotImplementedError

    def target(self) -> str:
        """The name that one of the labels must end in; empty for any."""
        return ""

    def narrow(self, node: cst.CSTNode) -> cst.CSTNode:
        """The part of ``node`` in which ``mentions`` are looked up."""
        return node

    def kind(self) -> str:
        """Kind of node, for messages."""
        return type(self).__name__.lower()

    def describe(self) -> str:
        """The matcher in words, for messages and tables."""
        text = f"{self.kind()} {self.target()}".strip()
        if self.mentions:
            text += f" that mentions {', '.join(self.mentions)}"
        if self.nth is not None:
            text += f" (number {self.nth})"
        return text

    def matches(self, node: cst.CSTNode) -> bool:
        """Whether ``node`` fits, ``nth`` left aside."""
        labels = self.labels(node)
        if labels is None:
            return False
        if self.target() and not any(ends_with(label, self.target()) for label in labels):
            return False
        part = self.narrow(node)
        return all(mentions(part, name) for name in self.mentions)

    def find(self, scope: Place) -> list[Place]:
        """All fitting nodes in ``scope``, in source order; ``nth`` picks one of them."""
        found = [place for place in body(scope) if self.matches(place.node)]
        if self.nth is not None:
            return found[self.nth : self.nth + 1]
        return found

    def candidates(self, scope: Place) -> list[str]:
        """Names of all nodes of this kind in ``scope``, for the message of a failed search."""
        names = [label for place in body(scope) for label in self.labels(place.node) or ()]
        return sorted(set(names))


@dataclass(frozen=True)
class Call(Matcher):
    """A call of ``name``."""

    name: str

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        if not isinstance(node, cst.Call):
            return None
        name = dotted(node.func)
        return [] if name is None else [name]

    def target(self) -> str:
        return self.name


@dataclass(frozen=True)
class Assign(Matcher):
    """An assignment (plain, annotated or augmented) to ``name``, also as part of a tuple."""

    name: str

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        if isinstance(node, cst.Assign):
            return [name for target in node.targets for name in _targets(target.target)]
        if isinstance(node, (cst.AnnAssign, cst.AugAssign)):
            return list(_targets(node.target))
        return None

    def target(self) -> str:
        return self.name

    def kind(self) -> str:
        return "assignment to"


@dataclass(frozen=True)
class Branch(Matcher):
    """An ``if`` or ``elif`` whose condition holds the names in ``mentions``."""

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        return list(_names(node.test)) if isinstance(node, cst.If) else None

    def narrow(self, node: cst.CSTNode) -> cst.CSTNode:
        return node.test if isinstance(node, cst.If) else node


@dataclass(frozen=True)
class Return(Matcher):
    """A ``return`` statement."""

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        return list(_names(node)) if isinstance(node, cst.Return) else None


@dataclass(frozen=True)
class Raise(Matcher):
    """A ``raise`` statement."""

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        return list(_names(node)) if isinstance(node, cst.Raise) else None


@dataclass(frozen=True)
class Loop(Matcher):
    """A ``for`` or ``while``; ``mentions`` is looked up in its header."""

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        return list(_names(self.narrow(node))) if isinstance(node, (cst.For, cst.While)) else None

    def narrow(self, node: cst.CSTNode) -> cst.CSTNode:
        if isinstance(node, cst.For):
            return cst.Tuple([cst.Element(node.target), cst.Element(node.iter)])
        return node.test if isinstance(node, cst.While) else node


@dataclass(frozen=True)
class With(Matcher):
    """A ``with`` block; ``mentions`` is looked up in its items."""

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        return list(_names(self.narrow(node))) if isinstance(node, cst.With) else None

    def narrow(self, node: cst.CSTNode) -> cst.CSTNode:
        if isinstance(node, cst.With):
            return cst.Tuple([cst.Element(item.item) for item in node.items])
        return node


@dataclass(frozen=True)
class Import(Matcher):
    """An import that binds or names ``name`` (a module, or a name taken from one)."""

    name: str

    def labels(self, node: cst.CSTNode) -> list[str] | None:
        if isinstance(node, cst.Import):
            return [name for alias in node.names if (name := dotted(alias.name))]
        if isinstance(node, cst.ImportFrom):
            names = [name] if node.module is not None and (name := dotted(node.module)) else []
            if not isinstance(node.names, cst.ImportStar):
                names += [name for alias in node.names if (name := dotted(alias.name))]
            return names
        return None

    def target(self) -> str:
        return self.name

    def kind(self) -> str:
        return "import of"


def _targets(node: cst.CSTNode) -> Iterator[str]:
    """Dotted names that an assignment target binds; ``x[i]`` binds ``x``."""
    if isinstance(node, (cst.Tuple, cst.List)):
        for element in node.elements:
            yield from _targets(element.value)
        return
    name = dotted(node)
    if name is not None:
        yield name.removesuffix("[]")


def _names(node: cst.CSTNode) -> Iterator[str]:
    """Outermost dotted names inside ``node``, for messages."""
    name = dotted(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
    if name is not None:
        yield name
        return
    for child in children(node):
        yield from _names(child)
