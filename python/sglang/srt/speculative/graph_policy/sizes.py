"""Batch sizes that are captured: which, for how many tokens each, and what they leave out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# A list that has to grow to --max-running-requests grows by at most so many sizes.
MOST_ADDED = 16


@dataclass(frozen=True)
class KindPlan:
    """The graphs of one pass.

    Attributes:
        kind: ``decode``, ``verify``, ``draft`` or ``draft_extend``.
        width: tokens a request; sizes count requests, so a graph of size 8 and width 3 holds 24 rows.
        sizes: batch sizes, ascending.
    """

    kind: str
    width: int
    sizes: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of each graph."""
        return tuple(size * self.width for size in self.sizes)

    @property
    def largest_rows(self) -> int:
        """Tokens of the largest graph; 0 without graphs."""
        return max(self.rows, default=0)

    def text(self) -> str:
        """``verify: 3 tokens a request, sizes 1 2 4 8, up to 24 rows``."""
        unit = "token" if self.width == 1 else "tokens"
        listed = " ".join(map(str, self.sizes))
        return f"{self.kind}: {self.width} {unit} a request, sizes {listed}, up to {self.largest_rows} rows"


@dataclass(frozen=True)
class Gap:
    """Batches that can run and that no graph serves.

    Attributes:
        missing: such batch sizes as inclusive ranges.
        reason: in words, with the flags.
    """

    missing: tuple[tuple[int, int], ...]
    reason: str

    def text(self) -> str:
        """``batches 9-48 have no graph: ...``."""
        listed = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in self.missing)
        return f"batches {listed} have no graph: {self.reason}"


def clamp(sizes: Iterable[int], most_running: int) -> tuple[int, ...]:
    """The sizes that upstream captures: none above the largest batch that can run, which then is one itself."""
    asked = sorted(set(sizes))
    if asked and asked[-1] > most_running:
        asked.append(most_running)
    return tuple(sorted({size for size in asked if 0 < size <= most_running}))


def find_gap(sizes: Iterable[int], most_running: int, *, padding: bool = True) -> Gap | None:
    """Batch sizes from 1 to ``most_running`` that no captured size serves.

    With padding a batch takes the next larger graph, so only what is above the largest is missing; without it every
    size has to be captured itself.
    """
    captured = set(clamp(sizes, most_running))
    if padding:
        largest = max(captured, default=0)
        missing = list(range(largest + 1, most_running + 1))
    else:
        missing = [size for size in range(1, most_running + 1) if size not in captured]
    if not missing:
        return None
    largest = max(captured, default=0)
    if not captured:
        reason = "no size is captured; give --cuda-graph-bs-decode"
    elif padding or missing[0] > largest:
        reason = (
            f"the largest captured batch is {largest} and --max-running-requests is {most_running}; "
            f"raise --cuda-graph-max-bs-decode to {most_running} or lower --max-running-requests to {largest}"
        )
    else:
        reason = "--disable-cuda-graph-padding needs every size; list them in --cuda-graph-bs-decode"
    return Gap(_ranges(missing), reason)


def grow(sizes: Iterable[int], most_running: int, *, padding: bool = True) -> tuple[int, ...]:
    """``sizes`` with what is missing up to ``most_running``: every size without padding, evenly spaced with it."""
    captured = sorted(set(sizes))
    if not padding:
        return tuple(sorted({*captured, *range(1, most_running + 1)}))
    largest = captured[-1] if captured else 0
    if largest >= most_running:
        return tuple(captured)
    step = max(4, math.ceil((most_running - largest) / MOST_ADDED / 4) * 4)
    added = range((largest // step + 1) * step, most_running, step)
    return tuple(sorted({*captured, *(size for size in added if size > largest), most_running}))


def plan(
    sizes: Iterable[int], most_running: int, *, draft_tokens: int, steps: int, topk: int, decode: bool
) -> tuple[KindPlan, ...]:
    """The graphs of one server.

    Args:
        sizes: batch sizes asked for.
        most_running: most requests of a batch.
        draft_tokens: tokens a verify scores a request (the root included); 0 or 1 without speculation.
        steps: draft steps; one step needs no draft graph.
        topk: branches a draft step.
        decode: whether plain decode is captured too.
    """
    captured = clamp(sizes, most_running)
    kinds = []
    if decode or draft_tokens <= 1:
        kinds.append(KindPlan("decode", 1, captured))
    if draft_tokens > 1:
        kinds.append(KindPlan("verify", draft_tokens, captured))
        if steps > 1:
            kinds.append(KindPlan("draft", topk, captured))
        kinds.append(KindPlan("draft_extend", draft_tokens, captured))
    return tuple(kinds)


def _ranges(values: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for value in values:
        if found and found[-1][1] == value - 1:
            found[-1] = (found[-1][0], value)
        else:
            found.append((value, value))
    return tuple(found)
