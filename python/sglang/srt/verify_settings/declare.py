"""What a setting is: one environment variable, declared once, with its type, default, meaning and reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["flag", "int", "float", "text", "choice", "list", "path"]
TRUE = frozenset({"1", "true", "yes", "y", "on"})
FALSE = frozenset({"0", "false", "no", "n", "off", ""})


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        name: of the variable.
        kind: how its text is read. A ``flag`` is 1 or 0 (also true, yes, on and their opposites), a ``list`` is
            separated by commas, a ``path`` names a place of one machine and is never shown.
        default: what holds when it is unset, as text; words in brackets where another program decides.
        meaning: what it does, in one line.
        reader: who reads it.
        choices: the words that a ``choice`` may be.
        least: smallest allowed number.
        most: largest allowed number.
    """

    name: str
    kind: Kind
    default: str
    meaning: str
    reader: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None

    def problem(self, value: str) -> str | None:
        """What is wrong with a value, in words that follow ``NAME=VALUE``; None where nothing is."""
        text = value.strip()
        if self.kind == "flag" and text.lower() not in TRUE | FALSE:
            return "is neither 1 nor 0"
        if self.kind == "choice" and text not in self.choices:
            return f"is none of {', '.join(self.choices)}"
        if self.kind in ("int", "float"):
            try:
                number = int(text) if self.kind == "int" else float(text)
            except ValueError:
                return "is not a whole number" if self.kind == "int" else "is not a number"
            if self.least is not None and number < self.least:
                return f"is below {self.least:g}"
            if self.most is not None and number > self.most:
                return f"is above {self.most:g}"
        return None


class SettingError(ValueError):
    """A variable whose value cannot be used: one sentence with value, limit and remedy."""


def refuse(setting: Setting, value: str, problem: str) -> SettingError:
    """The one sentence about a bad value."""
    shown = "(a path)" if setting.kind == "path" else value
    return SettingError(
        f"{setting.name}={shown} {problem}; correct it, or unset it for {setting.default or 'the default'} "
        f"({setting.meaning[0].lower()}{setting.meaning[1:]})"
    )
