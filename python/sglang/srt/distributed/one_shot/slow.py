"""A step of the start that takes long says so itself: its name, what it most likely waits for, and where it stands.

A start that seems to hang leaves a last log line that names the step *before*. Nothing is ended here: a first
compile may well take minutes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang.fork import counters
from sglang.srt.distributed.one_shot import start_places

logger = logging.getLogger("sglang.fork")

LIMIT_S = 60.0
#: Programs of a build that is under way.
COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "c++", "g++")
#: Functions that wait wherever they are called from, for stacks at none of ``start_places``.
SIGNS = {
    "barrier": "waits for the other ranks in a barrier",
    "all_gather_object": "waits for the other ranks in an exchange over the CPU group",
    "broadcast_object_list": "waits for the other ranks in an exchange over the CPU group",
    "synchronize": "waits for the GPU",
}


@contextmanager
def telling(what: str, hint: str = "", limit_s: float = LIMIT_S) -> Iterator[None]:
    """If the block takes longer than ``limit_s``, log what it is, what it waits for, its stack and the hint, once."""
    thread = threading.get_ident()

    def tell() -> None:
        stack = _stack(thread)
        state = diagnose(stack, descendants(os.getpid()))
        counters.add("slow_start", step=what, state=state)
        advice = f"; {hint}" if hint else ""
        logger.warning(
            "%s has taken %.0f s and is not done: %s%s\n%s", what, limit_s, state, advice, "\n".join(stack)
        )

    timer = threading.Timer(limit_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stack(thread: int) -> list[str]:
    frame = sys._current_frames().get(thread)
    return [line.rstrip() for line in traceback.format_stack(frame)] if frame is not None else []


def diagnose(stack: Sequence[str], programs: Sequence[str]) -> str:
    """What a step waits for, from its stack (outermost first) and the programs that run below this process.

    A compiler that runs is said first, whatever the stack says. Then the place of ``start_places`` with what starts
    without it, or the innermost function that waits.
    """
    running = [name for name in COMPILERS if name in programs]
    words = [f"a compiler is at work ({', '.join(running)})"] if running else []
    place = start_places.identify(stack)
    if place is not None:
        words.append(
            f"at {place.name}: {place.waits_for}" + (f"; cure: {place.switch}" if place.switch else "")
        )
    elif not running:
        waiting = [SIGNS[name] for _, name in start_places.frames_of(stack) if name in SIGNS]
        words.append(waiting[-1] if waiting else "no known sign in its stack")
    return "; ".join(words)


def descendants(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Names of the processes below ``pid``, in any order; empty where ``/proc`` does not tell."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in proc.glob("[0-9]*/stat"):
        try:
            text = entry.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The name stands in brackets and may hold blanks; the parent is the second word behind it.
        head, _, tail = text.rpartition(")")
        words = tail.split()
        if len(words) > 1:
            children.setdefault(int(words[1]), []).append((int(entry.parent.name), head.partition("(")[2]))
    names, waiting = [], [pid]
    while waiting:
        for child, name in children.get(waiting.pop(), []):
            names.append(name)
            waiting.append(child)
    return names
