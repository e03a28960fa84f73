"""The calls that patches put into upstream files.

Hooks are named as ``"package.module:function"`` and imported at their first use, not when the patched
upstream module is imported: our modules import upstream's, and an eager import would be a cycle.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from sglang.fork.topics import enabled

F = TypeVar("F", bound=Callable[..., Any])

_resolved: dict[tuple[str, str], Callable[..., Any]] = {}
_extras: dict[tuple[str, str], Callable[..., Any]] = {}


def resolve(target: str) -> Callable[..., Any]:
    """Import ``"package.module:name"`` (``name`` may be dotted) and return the object.

    Raises:
        ValueError: ``target`` is not of that form.
        ImportError: the module or the name is missing.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"hook {target!r} is not of the form 'package.module:function'")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ImportError(f"hook {target!r}: {module_name} has no {path!r}") from error
    hook: Callable[..., Any] = found
    return hook


def around(topic: str, target: str) -> Callable[[F], F]:
    """Decorator: run ``target(original, *args, **kwargs)`` in place of the decorated function.

    With the topic off the function object itself is returned, so stock behaviour costs nothing. A
    coroutine function stays one, because callers ask ``inspect.iscoroutinefunction``.
    """

    def decorate(original: F) -> F:
        if not enabled(topic):
            return original
        hook: Callable[..., Any] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal hook
            if hook is None:
                hook = resolve(target)
            return hook(original, *args, **kwargs)

        async def run_async(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        chosen = run_async if inspect.iscoroutinefunction(original) else run
        return functools.wraps(original)(chosen)  # type: ignore[return-value]

    return decorate


def _stock(*args: Any, **_: Any) -> Any:
    """Stand-in for a hook that is off: gives back the value it was handed."""
    return args[0] if args else None


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    """Stand-in for a keyword hook that is off: adds no keyword."""
    return {}


def call(topic: str, target: str) -> Callable[..., Any]:
    """The hook function; with the topic off, a function that returns its first argument.

    That rule lets one inserted line serve both cases: ``x = call(...)(x, self)`` leaves ``x`` alone
    when the topic is off, and a bare ``call(...)(self)`` does nothing.
    """
    key = (topic, target)
    found = _resolved.get(key)
    if found is None:
        found = _resolved[key] = resolve(target) if enabled(topic) else _stock
    return found


def wrap(topic: str, target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """For ``f(x)`` turned into ``wrap(topic, target, f)(x)``: runs ``hook(f, x)``, or ``f(x)`` when off."""
    if not enabled(topic):
        return function
    return functools.partial(call(topic, target), function)


def extra(topic: str, target: str) -> Callable[..., dict[str, Any]]:
    """The hook that returns keywords to add to a call (``f(x, **extra(...)(self))``); none when off."""
    key = (topic, target)
    found = _extras.get(key)
    if found is None:
        found = _extras[key] = resolve(target) if enabled(topic) else _nothing
    return found


def load(topic: str, module: str) -> None:
    """Import one of our modules for its registrations; does nothing when the topic is off."""
    if enabled(topic):
        importlib.import_module(module)


def reset() -> None:
    """Forget resolved hooks (for tests)."""
    _resolved.clear()
    _extras.clear()
