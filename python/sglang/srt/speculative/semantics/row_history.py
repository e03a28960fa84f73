"""What a request had said when it stood at a given row, for code that looks at the request itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


def output_before_drafts(recorded: Sequence[Sequence[int]], bonus: int, committed: int) -> list[int] | None:
    """The output up to and with the bonus, from whichever record is up to date.

    Args:
        recorded: output ids as different places know them, best first. With overlapped scheduling the
            request's own list is one step behind.
        bonus: the last committed token (candidate 0).
        committed: length that the result must have, the bonus included.

    Returns:
        ``committed`` ids, or None when no record has that length with or without the bonus.
    """
    for ids in recorded:
        if len(ids) == committed and ids and ids[-1] == bonus:
            return list(ids)
        if len(ids) == committed - 1:
            return [*ids, bonus]
    return None


def path_tokens(candidates: Sequence[int], ancestors: Sequence[bool]) -> list[int]:
    """Draft tokens on the way to a row: its ancestors without the bonus, which is candidate 0."""
    return [token for token, on_path in zip(candidates[1:], ancestors[1:], strict=True) if on_path]


class RequestAtRow:
    """A request as it would look if the output ended at one row; everything else is the request's own."""

    def __init__(self, request: Any, output_ids: Sequence[int]) -> None:
        self._request = request
        self.output_ids = array("q", output_ids)

    @property
    def seqlen(self) -> int:
        """Prompt and output together, as at this row."""
        return len(self._request.origin_input_ids) + len(self.output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
