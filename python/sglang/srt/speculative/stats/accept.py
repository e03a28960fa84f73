"""Counts of kept tokens.

Accept length counts tokens that the request keeps. A run that passes the end of the request (EOS, a stop
string, ``max_new_tokens``) is cut, and what lies behind the cut was never delivered: counting it makes
short answers look better than any draft could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def kept_tokens(accepted: int, length_before: int, finished_length: int | None) -> int:
    """Tokens of a verify that the request keeps.

    Args:
        accepted: tokens the verify accepted, bonus included.
        length_before: output tokens before this verify.
        finished_length: output length at which the request ended, or None while it runs.
    """
    if finished_length is None:
        return accepted
    return max(0, min(accepted, finished_length - length_before))


@dataclass
class KeptHistogram:
    """How many cycles kept 1, 2, ... tokens. Index i counts cycles with i draft tokens kept."""

    counts: list[int] = field(default_factory=list)

    def add(self, kept: int, n: int = 1) -> None:
        """Count ``n`` cycles that kept ``kept`` tokens, bonus included. A cycle that kept none counts as 1."""
        index = max(0, kept - 1)
        if index >= len(self.counts):
            self.counts.extend([0] * (index + 1 - len(self.counts)))
        self.counts[index] += n

    def merge(self, counts: Iterable[int]) -> None:
        """Add another histogram's counts."""
        for index, count in enumerate(counts):
            self.add(index + 1, count)

    @property
    def cycles(self) -> int:
        """Cycles counted."""
        return sum(self.counts)

    @property
    def drafts(self) -> int:
        """Draft tokens kept."""
        return sum(index * count for index, count in enumerate(self.counts))

    @property
    def length(self) -> float:
        """Mean accept length, bonus included; 0 before the first cycle."""
        return 1.0 + self.drafts / self.cycles if self.cycles else 0.0

    def by_position(self) -> list[float]:
        """Share of cycles that kept the draft token at position 1, 2, ...: never rises."""
        return position_rates(self.counts)


def position_rates(counts: Sequence[int], width: int | None = None) -> list[float]:
    """Share of cycles that kept at least 1, 2, ... draft tokens, from a histogram of drafts kept.

    ``width`` is the number of draft tokens proposed: positions never reached are then listed as 0.
    """
    cycles = sum(counts)
    if not cycles:
        return []
    rates, above = [], cycles
    for count in counts[:-1]:
        above -= count
        rates.append(above / cycles)
    return rates + [0.0] * ((width or 0) - len(rates))


def histogram_faults(
    counts: Sequence[int],
    verify_count: int,
    drafts: int,
    completion_tokens: int | None = None,
    plain_steps: int = 0,
) -> list[str]:
    """Identities that an acceptance histogram must satisfy; the violated ones in words.

    sum(h) is the number of verifies, sum(i * h[i]) the number of draft tokens kept, and the answer is the
    prefill's token, one bonus a verify, the drafts, and one token a plain step.
    """
    faults = []
    if sum(counts) != verify_count:
        faults.append(f"the histogram counts {sum(counts)} verifies, the request reports {verify_count}")
    weighted = sum(index * count for index, count in enumerate(counts))
    if weighted != drafts:
        faults.append(f"the histogram holds {weighted} accepted drafts, the request reports {drafts}")
    made = 1 + verify_count + drafts + plain_steps
    if completion_tokens is not None and completion_tokens != made:
        plain = f" + plain steps {plain_steps}" if plain_steps else ""
        faults.append(
            f"{completion_tokens} completion tokens, but prefill 1 + verifies {verify_count} + drafts {drafts}"
            f"{plain} make {made}"
        )
    return faults
