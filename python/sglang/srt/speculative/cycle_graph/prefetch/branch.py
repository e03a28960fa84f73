"""Asks for weights on a stream of its own, forked from the pass under capture and joined at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.prefetch.kernel import prefetch
from sglang.srt.speculative.cycle_graph.prefetch.plan import Part


class Branch:
    """One side stream. On a CPU nothing is launched; what was asked for is counted everywhere.

    Attributes:
        asked: calls by the point's name.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.asked: Counter[str] = Counter()
        cuda = torch.device(device).type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._open = False

    def ask(self, point: str, parts: Iterable[Part]) -> None:
        """Launch requests for ``parts`` beside what the current stream does next."""
        chosen = tuple(parts)
        if not chosen:
            return
        self.asked[point] += 1
        if self.stream is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        self._open = True
        with torch.cuda.stream(self.stream):
            for part in chosen:
                prefetch(part.memory)

    def join(self) -> None:
        """The current stream waits for the launches (not for the bytes); a capture must not end before."""
        if self._open:
            torch.cuda.current_stream().wait_stream(self.stream)
            self._open = False
