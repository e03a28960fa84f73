"""Errors of the engine. Each is one message for a person: what is wrong, where, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field


class EngineError(Exception):
    """A fault with one clear message.

    ``status`` is the exit status: 1 for a tree or environment that does not fit, 2 for bad input.
    """

    status = 1


class UsageError(EngineError):
    """Bad input: a wrong option, an unknown name, an unsupported Python."""

    status = 2


@dataclass
class AnchorError(EngineError):
    """An anchor that did not resolve to exactly one place, or a file that is not the pinned one."""

    topic: str
    file: str
    scope: str
    sought: str
    found: str
    base: str
    remedy: str
    near: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [
            f"patch {self.topic!r} does not apply to sglang {self.base}",
            f"  file:   {self.file}",
            f"  in:     {self.scope or 'module level'}",
            f"  sought: {self.sought}",
            f"  found:  {self.found}",
        ]
        if self.near:
            lines.append(f"  near:   {', '.join(self.near)}")
        lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __post_init__(self) -> None:
        super().__init__(str(self))
