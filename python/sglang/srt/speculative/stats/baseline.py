"""The plain decode time that the live break-even compares with.

A server that speculates never runs a plain decode, so it cannot know what one costs. A server of the
same model without speculation can: it records decode times by batch and context, and writes them where
``SGLANG_SPEC_BASELINE`` says. The speculating server reads that file. Without one the log line says from
which decode time on speculation wins, which is the same comparison turned round.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_SPEC_BASELINE"
SCHEMA = "spec-baseline/1"


class Baseline:
    """Decode milliseconds by batch and context.

    Times between measured contexts are interpolated linearly (a decode reads its context once); outside
    they are held at the nearest one. A batch that was not measured has no answer: how a decode scales
    with its batch is exactly what must not be guessed.
    """

    def __init__(self, points: dict[tuple[int, int], float] | None = None) -> None:
        self._points = dict(points or {})

    def record(self, batch: int, context: int, ms: float, weight: float = 0.1) -> None:
        """Move the figure of a batch and context bucket towards ``ms``."""
        key = (batch, bucket(context))
        old = self._points.get(key)
        self._points[key] = ms if old is None else old + weight * (ms - old)

    def decode_ms(self, batch: int, context: int) -> float | None:
        """Milliseconds of a plain decode, or None when this batch was never measured."""
        known = sorted((ctx, ms) for (size, ctx), ms in self._points.items() if size == batch)
        if not known:
            return None
        below = [point for point in known if point[0] <= context]
        above = [point for point in known if point[0] >= context]
        if not below:
            return above[0][1]
        if not above:
            return below[-1][1]
        (left, low), (right, high) = below[-1], above[0]
        return low if right == left else low + (high - low) * (context - left) / (right - left)

    def save(self, path: str | Path) -> None:
        """Write the figures in one step."""
        rows = [
            {"batch": batch, "context": context, "ms": ms}
            for (batch, context), ms in sorted(self._points.items())
        ]
        target = Path(path)
        scratch = target.with_name(target.name + ".part")
        scratch.write_text(json.dumps({"schema": SCHEMA, "decode": rows}) + "\n", encoding="utf-8")
        os.replace(scratch, target)

    @classmethod
    def load(cls, path: str | Path) -> Baseline:
        """Read a file. Raises ValueError naming it when it is not one."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r} is not {SCHEMA!r}")
            return cls(
                {(int(row["batch"]), int(row["context"])): float(row["ms"]) for row in document["decode"]}
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE}={path}: not a baseline file ({error})") from error

    def __len__(self) -> int:
        return len(self._points)


def bucket(context: int) -> int:
    """The context a figure is filed under: two buckets an octave, and 0 for an empty prefix."""
    if context <= 0:
        return 0
    return round(2 ** (round(2 * math.log2(context)) / 2))


def from_environment() -> Baseline:
    """The baseline named by the environment; an empty one, with one warning, when it cannot be read."""
    path = os.environ.get(VARIABLE, "")
    if not path or not Path(path).exists():
        return Baseline()
    try:
        return Baseline.load(path)
    except ValueError as error:
        logger.warning("%s; the break-even line does without it", error)
        return Baseline()
