"""The kinds of edit. Each adds calls of our functions at an anchor; none quotes or rewrites upstream text.

All inserted code goes through ``sglang.fork`` (imported as ``_fork`` in the patched file) and is gated by
the topic's switch, so ``SGLANG_FORK_DISABLE`` brings stock behaviour back without composing again.

Hooks are ``"package.module:function"``. ``args`` are expressions handed to the hook: names, attributes,
constants and keywords only, because logic belongs in the hook.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

import libcst as cst

from patches.engine.actions import Action, mark_statement, marked
from patches.engine.inserted import ALIAS, at_top, check_argument, expression_of, invoke, line_of, mark_place
from patches.engine.matchers import Assign, Branch, Call, Matcher
from patches.engine.tree import Place, body, definitions, dotted, statement


class NotFound(Exception):
    """An anchor that resolved to no place, or to several; the engine adds topic, file and base."""

    def __init__(self, sought: str, found: str, remedy: str, near: list[str] | None = None) -> None:
        super().__init__(sought)
        self.sought, self.found, self.remedy, self.near = sought, found, remedy, near or []


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Base of all edits: the upstream file (``sglang/...``) and the qualified name of the scope in it."""

    file: str
    scope: str = ""

    def __post_init__(self) -> None:
        for value in self._hooks():
            module, colon, name = value.partition(":")
            if not (module and colon and name):
                raise ValueError(f"hook {value!r} is not of the form 'package.module:function'")
        for text in getattr(self, "args", ()):
            check_argument(text)

    def _hooks(self) -> list[str]:
        hook = getattr(self, "hook", None)
        return [] if hook is None else [hook]

    def kind(self) -> str:
        """Name of the edit's kind, for tables."""
        return type(self).__name__

    def describe(self) -> str:
        """What is looked for, in words."""
        return f"definition of {self.scope}" if self.scope else "module"

    def anchor(self, module: cst.Module) -> Place:
        """The node this edit stands at. Raises NotFound."""
        return self.scope_place(module)

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        """The changes this edit makes in the pristine ``module``. Raises NotFound."""
        raise NotImplementedError

    def scope_place(self, module: cst.Module) -> Place:
        """The function, class or module that the edit is in. Raises NotFound."""
        root = Place(module, ())
        if not self.scope:
            return root
        known = list(definitions(root))
        found = [place for name, place in known if name == self.scope]
        return _one(found, f"definition of {self.scope}", [name for name, _ in known], self.scope)

    def only(self, module: cst.Module, matcher: Matcher) -> Place:
        """The one node in the scope that fits ``matcher``. Raises NotFound."""
        scope = self.scope_place(module)
        found = matcher.find(scope)
        return _one(found, matcher.describe(), matcher.candidates(scope), matcher.target())


def _one(found: list[Place], sought: str, known: list[str], wanted: str) -> Place:
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(
            sought,
            f"{len(found)} places",
            "narrow the matcher with `mentions`, or give `nth` with the reason in `because`",
        )
    near = _near(wanted, known)
    raise NotFound(
        sought,
        "nothing",
        "look at the upstream file: if the name moved, change the anchor; if the code is gone, retire the topic",
        near or sorted(set(known))[:5],
    )


def _near(wanted: str, known: list[str]) -> list[str]:
    """Up to five names near ``wanted``: first those that hold its last part, as a renaming often does."""
    last = wanted.rpartition(".")[2].lower()
    holding = sorted({name for name in known if last and last in name.lower()}, key=len)
    close = difflib.get_close_matches(wanted, known, n=5, cutoff=0.4)
    return list(dict.fromkeys([*holding[:3], *close]))[:5]


@dataclass(frozen=True, kw_only=True)
class Around(Edit):
    """Run ``hook(original, *args, **kwargs)`` in place of the function or method ``scope``.

    The decorator stands innermost, so it is handed the plain function under ``@staticmethod``,
    ``@property`` and the like; ``outermost`` puts it on top.
    """

    hook: str
    outermost: bool = False

    def anchor(self, module: cst.Module) -> Place:
        place = self.scope_place(module)
        if not isinstance(place.node, cst.FunctionDef):
            raise NotFound(
                f"function {self.scope or '(none named)'}", "a class or module", "name a function or method"
            )
        return place

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        call = cst.parse_expression(f'{ALIAS}.around("{topic}", "{self.hook}")')
        decorator = cst.Decorator(decorator=call, trailing_whitespace=marked(topic))

        def change(node: Any) -> cst.CSTNode:
            decorators = list(node.decorators)
            # Hooks of earlier topics in the series stay closer to the function.
            ours = sum(_is_ours(item) for item in decorators)
            decorators.insert(0 if self.outermost else len(decorators) - ours, decorator)
            changed: cst.CSTNode = node.with_changes(decorators=decorators)
            return changed

        return [Action(self.anchor(module), rewrite=change)]


def _is_ours(decorator: cst.Decorator) -> bool:
    call = decorator.decorator
    return isinstance(call, cst.Call) and dotted(call.func) == f"{ALIAS}.around"


@dataclass(frozen=True, kw_only=True)
class _Insert(Edit):
    match: Matcher
    hook: str
    args: tuple[str, ...] = ()
    assign: str = ""

    def describe(self) -> str:
        return self.match.describe()

    def anchor(self, module: cst.Module) -> Place:
        scope = self.scope_place(module)
        # Several matches inside one statement are one place to insert at.
        found = {id(place.node): place for place in map(statement, self.match.find(scope))}
        place = _one(list(found.values()), self.describe(), self.match.candidates(scope), self.match.target())
        parent = place.path[-1]
        if not isinstance(parent, (cst.Module, cst.IndentedBlock)):
            raise NotFound(
                f"{self.describe()} as a statement of a block",
                "an elif or a statement on its header's line",
                "anchor at the enclosing statement",
            )
        return place

    def line(self, topic: str) -> cst.SimpleStatementLine:
        """The inserted statement."""
        text = invoke(topic, self.hook, self.args)
        return line_of(f"{self.assign} = {text}" if self.assign else text, topic)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.assign and (not self.args or self.args[0] != self.assign):
            raise ValueError(
                f"assign={self.assign!r} needs the same expression as first argument: a hook that is off gives "
                "its first argument back"
            )


@dataclass(frozen=True, kw_only=True)
class InsertBefore(_Insert):
    """Call ``hook(*args)`` before the matched statement; ``assign`` takes the result."""

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        return [Action(self.anchor(module), before=(self.line(topic),))]


@dataclass(frozen=True, kw_only=True)
class InsertAfter(_Insert):
    """Call ``hook(*args)`` after the matched statement; ``assign`` takes the result."""

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        return [Action(self.anchor(module), after=(self.line(topic),))]


@dataclass(frozen=True, kw_only=True)
class WrapCall(Edit):
    """Turn the matched call ``f(x)`` into ``hook(f, x)``."""

    match: Call
    hook: str

    def describe(self) -> str:
        return self.match.describe()

    def anchor(self, module: cst.Module) -> Place:
        return self.only(module, self.match)

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        place = self.anchor(module)

        def change(node: Any) -> cst.CSTNode:
            wrapped = expression_of(f'{ALIAS}.wrap("{topic}", "{self.hook}", F)', F=node.func)
            changed: cst.CSTNode = node.with_changes(func=wrapped)
            return changed

        return [Action(place, rewrite=change), mark_place(place, topic)]


@dataclass(frozen=True, kw_only=True)
class ReplaceArgument(Edit):
    """Turn an argument ``v`` of the matched call into ``hook(v, *args)``; ``argument`` is index or keyword."""

    match: Call
    argument: int | str
    hook: str
    args: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"argument {self.argument} of {self.match.describe()}"

    def anchor(self, module: cst.Module) -> Place:
        place = self.only(module, self.match)
        call = cst.ensure_type(place.node, cst.Call)
        found = [arg for index, arg in enumerate(call.args) if self._is_meant(index, arg)]
        if len(found) != 1:
            names = [arg.keyword.value for arg in call.args if arg.keyword is not None]
            raise NotFound(
                self.describe(),
                f"{len(found)} such arguments among {len(call.args)}",
                "name the argument as the call writes it, or use AddKeywords",
                names,
            )
        return Place(found[0], (*place.path, call))

    def _is_meant(self, index: int, arg: cst.Arg) -> bool:
        if isinstance(self.argument, int):
            return index == self.argument and arg.keyword is None and not arg.star
        return arg.keyword is not None and arg.keyword.value == self.argument

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        place = self.anchor(module)
        text = invoke(topic, self.hook, ("V", *self.args))

        def change(node: Any) -> cst.CSTNode:
            changed: cst.CSTNode = node.with_changes(value=expression_of(text, V=node.value))
            return changed

        return [Action(place, rewrite=change), mark_place(place, topic)]


@dataclass(frozen=True, kw_only=True)
class AddKeywords(Edit):
    """Add ``**hook(*args)`` to the matched call; the hook returns a dict of keywords."""

    match: Call
    hook: str
    args: tuple[str, ...] = ()

    def describe(self) -> str:
        return self.match.describe()

    def anchor(self, module: cst.Module) -> Place:
        return self.only(module, self.match)

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        place = self.anchor(module)
        value = cst.parse_expression(invoke(topic, self.hook, self.args, "extra"))

        def change(node: Any) -> cst.CSTNode:
            args = list(node.args)
            trailing: cst.Comma | cst.MaybeSentinel = cst.MaybeSentinel.DEFAULT
            if args:
                last = args[-1]
                if isinstance(last.comma, cst.Comma):
                    # The written-out comma and its line break stay where the last argument's was.
                    trailing = last.comma
                args[-1] = last.with_changes(
                    comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")),
                    whitespace_after_arg=cst.SimpleWhitespace(""),
                )
                args.append(
                    cst.Arg(value, star="**", comma=trailing, whitespace_after_arg=last.whitespace_after_arg)
                )
            else:
                args.append(cst.Arg(value, star="**"))
            changed: cst.CSTNode = node.with_changes(args=args)
            return changed

        return [Action(place, rewrite=change), mark_place(place, topic)]


@dataclass(frozen=True, kw_only=True)
class GuardBranch(Edit):
    """Narrow (``and``), widen (``or``) or decide (``value``) the condition of the matched branch.

    ``and``: taken if the condition holds and ``hook(True, *args)`` is true. ``or``: taken if it holds or
    ``hook(False, *args)`` is true. ``value``: taken if ``hook(condition, *args)`` is true.
    """

    match: Branch
    hook: str
    how: Literal["and", "or", "value"] = "and"
    args: tuple[str, ...] = ()

    def describe(self) -> str:
        return self.match.describe()

    def anchor(self, module: cst.Module) -> Place:
        return self.only(module, self.match)

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        place = self.anchor(module)
        first = {"and": "True", "or": "False", "value": "TEST"}[self.how]
        call = invoke(topic, self.hook, (first, *self.args))
        text = call if self.how == "value" else f"TEST {self.how} {call}"
        marking = mark_statement(topic)

        def change(node: Any) -> cst.CSTNode:
            test = node.test
            if self.how != "value" and not test.lpar:
                test = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            space = cst.SimpleWhitespace(" ")
            return marking(
                node.with_changes(test=expression_of(text, TEST=test), whitespace_before_test=space)
            )

        return [Action(place, rewrite=change)]


@dataclass(frozen=True, kw_only=True)
class AddImport(Edit):
    """Import our ``module`` for its registrations, at the ``top`` or the ``end`` of the upstream file."""

    module: str
    where: Literal["top", "end"] = "end"

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        line = line_of(f'{ALIAS}.load("{topic}", "{self.module}")', topic)
        if self.where == "top" or not module.body:
            return [at_top(module, line)]
        return [Action(Place(module.body[-1], (module,)), after=(line,))]


@dataclass(frozen=True, kw_only=True)
class InsertAtTop(Edit):
    """Call ``hook()`` as the first statement of the upstream file."""

    hook: str

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        return [at_top(module, line_of(invoke(topic, self.hook, ()), topic))]


@dataclass(frozen=True, kw_only=True)
class AddField(Edit):
    """Add the field ``name: annotation = default`` at the end of the fields of the dataclass ``scope``.

    A field has no switch of its own; with the topic off nothing reads it.
    """

    name: str
    annotation: str
    default: str

    def describe(self) -> str:
        return f"fields of class {self.scope}"

    def anchor(self, module: cst.Module) -> Place:
        place = self.scope_place(module)
        taken = Assign(self.name).find(place)
        if taken:
            raise NotFound(
                f"class {self.scope} without {self.name}", "the field", "upstream has it: retire the edit"
            )
        fields = [p for p in body(place) if isinstance(p.node, cst.AnnAssign) and _is_field(p)]
        if not isinstance(place.node, cst.ClassDef) or not fields:
            raise NotFound(self.describe(), "no annotated field", "name a dataclass")
        return statement(fields[-1])

    def actions(self, module: cst.Module, topic: str) -> list[Action]:
        line = line_of(f"{self.name}: {self.annotation} = {self.default}", topic)
        return [Action(self.anchor(module), after=(line,))]


def _is_field(place: Place) -> bool:
    """Whether an annotated assignment stands directly in the class body."""
    line = statement(place)
    return len(line.path) >= 2 and isinstance(line.path[-2], cst.ClassDef)
