"""Process-wide counters: ``add("graph_replays", batch=4)``, read as ``{'graph_replays{batch="4"}': 1}``."""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()
_values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}


def add(name: str, n: float = 1, **labels: object) -> None:
    """Add ``n`` to the counter ``name`` with these labels (labels are compared as text)."""
    key = (name, tuple(sorted((label, str(value)) for label, value in labels.items())))
    with _lock:
        _values[key] = _values.get(key, 0) + n


def bound(name: str, **labels: object) -> Callable[[], None]:
    """What adds 1 to one counter, made once: for a path where making the key in every call would show."""
    key = (name, tuple(sorted((label, str(value)) for label, value in labels.items())))

    def increment() -> None:
        with _lock:
            _values[key] = _values.get(key, 0) + 1

    return increment


def snapshot() -> dict[str, float]:
    """A copy of all counters; the key is ``name`` or ``name{label="value",...}`` with sorted labels."""
    with _lock:
        items = list(_values.items())
    return {_text(name, labels): value for (name, labels), value in items}


def _text(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return name
    inner = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inner}}}"


def reset() -> None:
    """Set every counter back to nothing (for tests)."""
    with _lock:
        _values.clear()
