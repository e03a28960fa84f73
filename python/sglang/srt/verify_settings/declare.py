"""What a setting is: one environment variable, declared once, with its type, default, meaning and reader."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["flag", "int", "float", "text", "choice", "list", "path"]
TRUE = frozenset({"1", "true", "yes", "y", "on"})
FALSE = frozenset({"0", "false", "no", "n", "off", ""})
# A whole number as C's strtoll takes it with base 0, which is how NCCL reads every flag and number. Python's int()
# would also take underscores and the digits of other scripts.
_C_NUMBER = re.compile(
    r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]{1,15})|(0[0-7]{0,19})|([1-9][0-9]{0,17}))\s*", re.ASCII
)
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        name: of the variable.
        kind: how its text is read. A ``flag`` is 1 or 0 (of ours also true, yes, on and their opposites; NCCL
            reads digits only), a ``list`` is separated by commas, a ``path`` names a place of one machine and is never shown.
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
        if self.name.startswith("NCCL_"):
            return self._problem_in_c(value)
        text = value.strip()
        if self.kind == "flag" and text.lower() not in TRUE | FALSE:
            return "is neither 1 nor 0"
        if self.kind == "choice" and text not in self.choices:
            return f"is none of {', '.join(self.choices)}"
        if self.kind == "int":
            return self._outside(int(text)) if _NUMBER.fullmatch(text) else "is not a whole number"
        if self.kind == "float":
            try:
                number = float(text)
            except ValueError:
                return "is not a number"
            return self._outside(number) if math.isfinite(number) else "is not a finite number"
        return None

    def _problem_in_c(self, value: str) -> str | None:
        """The same for what NCCL reads: words are compared as they stand, of a number the digits in front count."""
        if self.kind in ("flag", "int"):
            found = _C_NUMBER.fullmatch(value)
            if found is None:
                return "is not a whole number, and NCCL reads the digits in front only (true is 0 or the default, 16M is 16)"
            sign, *digits = found.groups()
            number = next(int(text, base) for text, base in zip(digits, (16, 8, 10), strict=True) if text)
            number = -number if sign == "-" else number
            if self.kind == "flag" and number not in (0, 1):
                return "is neither 1 nor 0"
            return self._outside(number)
        if self.kind == "choice" and value not in self.choices:
            if value.strip() in self.choices:
                return "has blanks around it, and NCCL compares it as it stands"
            return f"is none of {', '.join(self.choices)}"
        return None

    def _outside(self, number: float) -> str | None:
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
