"""Whether a row's phases can be believed: do they sum to the cycle that was measured from outside, and how often.

A cycle is measured from outside as the time of a long answer less that of a short one, the phases inside by events.
Both are right or the two disagree; one measurement alone cannot tell a disturbed answer from a wrong clock.
"""

from __future__ import annotations

from sglang.bench_verify.rows import Row

PHASES = ("draft", "verify", "sample", "draft_extend", "host_gap")
#: Largest relative distance between the sum of the phases and the cycle.
LIMIT = 0.05
#: Measurements of a case from which a median can leave one disturbed answer out of account, at least in part.
ENOUGH = 2


def phases_over_cycle(row: Row) -> float | None:
    """Sum of the phases over the measured cycle; None where either is missing.

    Phases stand in ``phases_ms``, in some rows as metrics ``verify_ms`` and so on. A cycle that is itself the sum of
    the phases (rows of a running server) says nothing and is told by ``measured_from_outside``.
    """
    cycle = row.metrics.get("cycle_ms")
    phases = row.phases_ms or {
        name: row.metrics[f"{name}_ms"].value for name in PHASES if f"{name}_ms" in row.metrics
    }
    if cycle is None or cycle.value <= 0 or "verify" not in phases:
        return None
    return sum(phases.get(name, 0.0) for name in PHASES) / cycle.value


def measured_from_outside(row: Row) -> bool:
    """Whether the cycle comes from the length of answers, and not from the phases themselves."""
    return bool(row.metrics.get("cycle_ms") and row.metrics["cycle_ms"].samples)


def doubts(row: Row) -> list[str]:
    """Why the phases of a row are rough, in words; empty where they stand."""
    found = []
    ratio = phases_over_cycle(row)
    if ratio is None or not measured_from_outside(row):
        return []
    if abs(ratio - 1.0) > LIMIT:
        found.append(f"phases sum to {100 * ratio:.0f}% of the measured cycle")
    count = len(row.metrics["cycle_ms"].samples)
    if found and count < ENOUGH:
        found.append("measured once: raise --rounds")
    return found
