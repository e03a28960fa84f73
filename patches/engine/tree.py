"""Walking a libcst module: qualified names, dotted names, and nodes with their ancestors.

libcst's own metadata wrapper copies the whole tree and visits it several times; on upstream's largest
file (9,500 lines) that alone takes longer than everything here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import libcst as cst

Definition = cst.FunctionDef | cst.ClassDef

# Layout only: nothing in these fields can be an anchor.
_LAYOUT_PREFIXES = ("whitespace", "leading_", "lines_", "trailing_", "lpar", "rpar", "header", "footer")


@dataclass(frozen=True)
class Place:
    """A node and its ancestors, outermost first."""

    node: cst.CSTNode
    path: tuple[cst.CSTNode, ...]


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    names: tuple[str, ...] = tuple(kind.__dataclass_fields__)
    return tuple(name for name in names if not name.startswith(_LAYOUT_PREFIXES))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Direct children in source order, layout left out."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


def walk(place: Place) -> Iterator[Place]:
    """Every node below ``place``, not entering nested functions and classes.

    Those have qualified names of their own: an edit that means them must name them.
    """
    path = (*place.path, place.node)
    for child in children(place.node):
        below = Place(child, path)
        yield below
        if not isinstance(child, Definition):
            yield from walk(below)


def body(place: Place) -> Iterator[Place]:
    """What is searched in a scope: the body of a function or class, or the module."""
    node = place.node
    if isinstance(node, Definition):
        block = Place(node.body, (*place.path, node))
        yield from walk(block)
    else:
        yield from walk(place)


def definitions(place: Place, prefix: str = "") -> Iterator[tuple[str, Place]]:
    """Every function and class with its qualified name, ``Class.method`` or ``outer.inner``."""
    for child in children(place.node):
        below = Place(child, (*place.path, place.node))
        if isinstance(child, Definition):
            name = f"{prefix}{child.name.value}"
            yield name, below
            yield from definitions(Place(child.body, (*below.path, child)), f"{name}.")
        elif isinstance(child, _CONTAINERS):
            yield from definitions(below, prefix)


_CONTAINERS = (
    cst.BaseCompoundStatement,
    cst.BaseSuite,
    cst.Else,
    cst.ExceptHandler,
    cst.ExceptStarHandler,
    cst.Finally,
    cst.MatchCase,
)


def dotted(node: cst.CSTNode) -> str | None:
    """``a.b.c`` of a name or attribute chain; a call or subscript inside it reads ``()`` or ``[]``."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return f"{base if base is not None else '?'}.{node.attr.value}"
    if isinstance(node, cst.Call):
        base = dotted(node.func)
        return None if base is None else f"{base}()"
    if isinstance(node, cst.Subscript):
        base = dotted(node.value)
        return None if base is None else f"{base}[]"
    return None


def ends_with(name: str, wanted: str) -> bool:
    """Whether the dotted ``name`` is ``wanted`` or ends in it: ``self.runner.run`` ends in ``run``."""
    return name == wanted or name.endswith("." + wanted)


def mentions(node: cst.CSTNode, wanted: str) -> bool:
    """Whether ``node`` holds the name ``wanted`` (dotted, compared from the right) or, quoted, that string."""
    text = wanted[1:-1] if wanted[:1] in {"'", '"'} and wanted[-1:] == wanted[:1] else None
    for place in (Place(node, ()), *walk(Place(node, ()))):
        current = place.node
        if text is not None:
            if isinstance(current, cst.SimpleString) and current.evaluated_value == text:
                return True
        elif isinstance(current, (cst.Name, cst.Attribute)):
            name = dotted(current)
            if name is not None and ends_with(name, wanted):
                return True
    return False


def statement(place: Place) -> Place:
    """The statement of a block that ``place`` is, or is part of."""
    chain = (*place.path, place.node)
    for index in range(len(chain) - 1, -1, -1):
        node = chain[index]
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            return Place(node, chain[:index])
    raise ValueError("a node outside any statement")
