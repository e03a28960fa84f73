"""Reading nested facts, any part of which may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def section(facts: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A nested section, empty where any part of the path is absent."""
    found: Any = facts
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
