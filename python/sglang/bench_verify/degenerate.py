"""Is a generated text a loop?

A model that repeats two tokens for ever makes every draft right: 3.93 tokens a step were reported for
such a text where real chat gave 1.94. The share of distinct bigrams tells the two apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

# Prose keeps well over half of its bigrams distinct at a few hundred tokens, code and tables fewer.
DISTINCT_FLOOR = 0.25
SHORTEST = 32
TAIL = 48
LONGEST_PERIOD = 12


def distinct_bigrams(tokens: Sequence[Hashable]) -> float:
    """Distinct bigrams over all bigrams; 1.0 for texts too short to have any."""
    pairs = list(itertools.pairwise(tokens))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def period(tokens: Sequence[Hashable]) -> int:
    """Length of the cycle that the text ends in, 0 when it does not end in one."""
    tail = tokens[-TAIL:]
    if len(tail) < TAIL:
        return 0
    for length in range(1, LONGEST_PERIOD + 1):
        if all(tail[index] == tail[index - length] for index in range(length, len(tail))):
            return length
    return 0


def flag(tokens: Sequence[Hashable]) -> str:
    """Why the text is degenerate, in words; empty when it is not."""
    if len(tokens) < SHORTEST:
        return ""
    if loop := period(tokens):
        return f"degenerate: ends in a loop of {loop} token(s)"
    share = distinct_bigrams(tokens)
    if share < DISTINCT_FLOOR:
        return f"degenerate: {100 * share:.0f}% of its bigrams are distinct"
    return ""
