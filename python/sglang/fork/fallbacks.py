"""Every time a fast path hands work back to upstream's path: logged once with its reason, and counted.

``record("verify-attention", "head dim 96", detail="limit 576")`` is cheap enough for a per-step call. Counts belong
to the process that made them; the scheduler's are the ones to export.
"""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("sglang.fork")

# Reasons become metric labels. A caller that formats a varying number into its reason would grow the
# table without bound, so what comes after this many reasons of one path is counted under OTHER.
MAX_REASONS_PER_PATH = 64
OTHER = "other reasons"

_lock = threading.Lock()
_counts: dict[str, dict[str, int]] = {}


def record(path: str, reason: str, *, detail: str = "") -> None:
    """Count one fallback of ``path`` for ``reason``; the first of each pair is logged as a warning.

    Args:
        path: name of the fast path that was not taken (usually its topic).
        reason: why, without values that change from call to call.
        detail: shown in the log line only (value, limit, remedy).
    """
    with _lock:
        reasons = _counts.setdefault(path, {})
        if reason not in reasons and len(reasons) >= MAX_REASONS_PER_PATH:
            reason, detail = OTHER, ""
        first = reason not in reasons
        reasons[reason] = reasons.get(reason, 0) + 1
    if first:
        suffix = f" ({detail})" if detail else ""
        logger.warning("%s: falling back to the stock path: %s%s", path, reason, suffix)


def snapshot() -> dict[str, dict[str, int]]:
    """A copy of all counts so far: ``{path: {reason: count}}``."""
    with _lock:
        return {path: dict(reasons) for path, reasons in _counts.items()}


def reset() -> None:
    """Forget all counts, and log the next of each pair again (for tests)."""
    with _lock:
        _counts.clear()
