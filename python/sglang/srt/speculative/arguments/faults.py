"""The one exception of this package: a sentence that names the value, the limit and the remedy."""

from __future__ import annotations


class ArgumentFault(ValueError):
    """An option, a target or a draft that cannot be served as asked.

    Args:
        value: what was given, by name and value, as it starts the sentence ("--speculative-num-steps 0").
        limit: what it must be instead or collides with, as it goes on ("must be from 1 to 1023").
        remedy: what to type to get going ("give --speculative-num-steps 2").
        code: short stable name of the rule, for tests and documentation.
    """

    def __init__(self, value: str, limit: str, remedy: str, *, code: str) -> None:
        self.value = value
        self.limit = limit
        self.remedy = remedy
        self.code = code
        super().__init__(f"{value} {limit}; {remedy}.")

    def __reduce__(self) -> tuple[object, ...]:
        # ValueError's own pickling would call the class with the finished sentence as its only argument.
        return (_rebuild, (self.value, self.limit, self.remedy, self.code))


def _rebuild(value: str, limit: str, remedy: str, code: str) -> ArgumentFault:
    return ArgumentFault(value, limit, remedy, code=code)


def one_line(text: object, limit: int = 160) -> str:
    """``text`` with every run of white space as one blank, cut after ``limit`` characters."""
    flat = " ".join(str(text).split()).rstrip(".")
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."
