"""How many distinct experts a verify reads.

A decode reads the experts of one token. A verify of ``n`` tokens reads the union over its tokens, which
is why its MoE part can never cost what a decode's costs, whatever the kernels.
"""

from __future__ import annotations

import random


def expected_union(experts: int, per_token: int, tokens: int) -> float:
    """Mean distinct experts when every token picks ``per_token`` of ``experts`` freely and evenly.

    384 experts, 8 a token: 8 for one token, 23.5 for three, 46.9 for six.
    """
    if not 0 < per_token <= experts:
        raise ValueError(f"{per_token} experts a token of {experts} experts")
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def correlated_union(experts: int, per_token: int, tokens: int, repeat: float) -> float:
    """The same when a token repeats each of its predecessor's experts with chance ``repeat``.

    Neighbouring tokens of real text share experts more often than chance; ``repeat`` is that excess:
    0 gives ``expected_union``, 1 gives ``per_token``.
    """
    fresh = expected_union(experts, per_token, tokens)
    return per_token + (1.0 - repeat) * (fresh - per_token)


def simulated_union(experts: int, per_token: int, tokens: int, rounds: int, seed: int = 0) -> float:
    """Mean distinct experts of ``rounds`` random verifies."""
    rng = random.Random(seed)
    total = 0
    for _ in range(rounds):
        seen: set[int] = set()
        for _ in range(tokens):
            seen.update(rng.sample(range(experts), per_token))
        total += len(seen)
    return total / rounds
