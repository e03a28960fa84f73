"""The break-even of speculation: what a cycle costs against what it keeps.

A plain decode gives one token in ``decode`` ms. A cycle gives ``kept`` tokens in ``cycle`` ms. It wins
when ``kept * decode > cycle``, so the accept length it needs is ``cycle / decode``. Accept length counts
the bonus token: a draft of which nothing is accepted has accept length 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class BreakEvenError(ValueError):
    """A time that cannot be one."""


@dataclass(frozen=True)
class Verdict:
    """One comparison of a cycle with a plain decode.

    Attributes:
        cycle_ms: one whole cycle.
        decode_ms: one plain decode of the same batch and context.
        kept: mean tokens kept a cycle and request, bonus included.
        needed: accept length at which both are equally fast.
        speedup: tokens a second with speculation over tokens a second without.
    """

    cycle_ms: float
    decode_ms: float
    kept: float
    needed: float
    speedup: float

    @property
    def wins(self) -> bool:
        """Whether speculation is faster."""
        return self.speedup > 1.0

    def text(self) -> str:
        """One line for logs: ``cycle 3.40 ms, decode 1.90 ms: needs 1.79 accepted, gets 2.04: 1.14x``."""
        return (
            f"cycle {self.cycle_ms:.2f} ms, decode {self.decode_ms:.2f} ms: "
            f"needs {self.needed:.2f} accepted, gets {self.kept:.2f}: {self.speedup:.2f}x"
        )


def needed(cycle_ms: float, decode_ms: float) -> float:
    """Accept length (bonus included) at which a cycle of ``cycle_ms`` breaks even.

    Raises BreakEvenError for a time that is not positive.
    """
    for name, value in (("cycle", cycle_ms), ("decode", decode_ms)):
        if not value > 0:
            raise BreakEvenError(f"{name} time is {value} ms, it must be positive")
    return cycle_ms / decode_ms


def needed_from_phases(decode_ms: float, phases_ms: Mapping[str, float]) -> float:
    """The same from the parts of a cycle: verify 12, draft 2, decode 10 gives 1.4."""
    return needed(sum(phases_ms.values()), decode_ms)


def judge(cycle_ms: float, decode_ms: float, kept: float) -> Verdict:
    """Compare a cycle that keeps ``kept`` tokens with a plain decode."""
    required = needed(cycle_ms, decode_ms)
    return Verdict(
        cycle_ms=cycle_ms, decode_ms=decode_ms, kept=kept, needed=required, speedup=kept / required
    )


def kept_with(position_rates: Sequence[float], drafted: int) -> float:
    """Expected accept length of a chain of ``drafted`` tokens.

    Args:
        position_rates: chance that the draft token at position 1, 2, ... is accepted *and* everything
            before it was (so the list never rises), as counted from an acceptance histogram.
        drafted: draft tokens of the chain; positions past the list repeat its last conditional rate.
    """
    total, previous, last = 1.0, 1.0, 0.0
    for position in range(drafted):
        if position < len(position_rates):
            rate = position_rates[position]
            last = rate / previous if previous > 0 else 0.0
        else:
            rate = previous * last
        total += rate
        previous = rate
    return total


def best_drafted(
    cycle_ms: Mapping[int, float], decode_ms: float, position_rates: Sequence[float]
) -> tuple[int, dict[int, float]]:
    """The number of draft tokens that gives the most tokens a second.

    Args:
        cycle_ms: draft tokens a cycle (0 = plain decode, not needed here) -> cycle time.
        decode_ms: plain decode time.
        position_rates: see ``kept_with``.

    Returns:
        The best number (0 when no speculation wins) and the speed-up of each.
    """
    speedups = {0: 1.0}
    for drafted, cycle in cycle_ms.items():
        if drafted > 0:
            speedups[drafted] = judge(cycle, decode_ms, kept_with(position_rates, drafted)).speedup
    best = max(speedups, key=lambda drafted: (speedups[drafted], -drafted))
    return best, dict(sorted(speedups.items()))
