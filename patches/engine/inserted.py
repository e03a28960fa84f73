"""The code that edits insert: calls through ``sglang.fork``, marked with their topic, and the import of it."""

from __future__ import annotations

import ast

import libcst as cst

from patches.engine.actions import Action, mark_statement, marked
from patches.engine.tree import Place, dotted, statement

ALIAS = "_fork"
IMPORT = f"from sglang import fork as {ALIAS}"

_PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.Load, ast.Starred, ast.keyword, ast.Subscript)


def check_argument(text: str) -> None:
    """Raise ``ValueError`` unless ``text`` is one argument of names, attributes, subscripts and constants."""
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) != 1:
        raise ValueError(f"argument {text!r} is not one argument")
    for part in (*call.args, *call.keywords):
        for node in ast.walk(part):
            if not isinstance(node, _PLAIN):
                raise ValueError(
                    f"argument {text!r} holds {type(node).__name__}; only names, attributes, subscripts and "
                    "constants may stand in a patch, logic belongs in the hook"
                )


def invoke(topic: str, hook: str, args: tuple[str, ...], function: str = "call") -> str:
    """The text of a call of ``hook`` that the topic's switch gates."""
    return f'{ALIAS}.{function}("{topic}", "{hook}")({", ".join(args)})'


def line_of(text: str, topic: str) -> cst.SimpleStatementLine:
    """A statement on one line, marked with its topic."""
    parsed = cst.parse_statement(text)
    line = cst.ensure_type(parsed, cst.SimpleStatementLine)
    return line.with_changes(trailing_whitespace=marked(topic))


def expression_of(text: str, **parts: cst.BaseExpression) -> cst.BaseExpression:
    """Parse ``text`` and put nodes of the pristine tree in place of the names in ``parts``."""

    class Fill(cst.CSTTransformer):
        def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
            return parts.get(original_node.value, updated_node)

    filled = cst.parse_expression(text).visit(Fill())
    return cst.ensure_type(filled, cst.BaseExpression)  # type: ignore[type-abstract]


def fork_import(module: cst.Module, topic: str) -> Action:
    """The import of ``sglang.fork``, after the docstring and the ``__future__`` imports."""
    return at_top(module, line_of(IMPORT, topic))


def at_top(module: cst.Module, line: cst.SimpleStatementLine) -> Action:
    """Insert ``line`` behind the docstring and the ``__future__`` imports."""
    root = Place(module, ())
    last: cst.CSTNode | None = None
    for index, node in enumerate(module.body):
        if not _is_preamble(node, first=index == 0):
            break
        last = node
    if last is not None:
        return Action(Place(last, (module,)), after=(line,))
    if module.body:
        return Action(Place(module.body[0], (module,)), before=(line,))
    return Action(root, rewrite=lambda node: node.with_changes(body=[line]))


def _is_preamble(node: cst.CSTNode, *, first: bool) -> bool:
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    only = node.body[0]
    if first and isinstance(only, cst.Expr):
        return isinstance(only.value, (cst.SimpleString, cst.ConcatenatedString))
    return (
        isinstance(only, cst.ImportFrom) and only.module is not None and dotted(only.module) == "__future__"
    )


def mark_place(place: Place, topic: str) -> Action:
    """Mark the statement that holds ``place`` with the topic."""
    return Action(statement(place), rewrite=mark_statement(topic))
