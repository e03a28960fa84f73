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

logger = logging.getLogger("sglang.fork")

LIMIT_S = 60.0
#: Programs of a build that is under way.
COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "c++", "g++")
#: Words in a stack, innermost frames first, and what they mean. The first that fits is told.
SIGNS = (
    ("recv_fd", "waits for another rank's memory handle on a Unix socket, which has no time limit"),
    ("build_and_load", "builds or loads a compiled module"),
    ("ncclCommInitRank", "NCCL connects the ranks"),
    ("barrier", "waits for the other ranks in a barrier"),
    ("rendezvous", "ranks exchange symmetric memory"),
    ("all_gather_object", "waits for the other ranks in an exchange over the CPU group"),
    ("broadcast_object_list", "waits for the other ranks in an exchange over the CPU group"),
    ("new_group", "the ranks make a process group"),
    ("synchronize", "waits for the GPU"),
)


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

    A compiler that runs is the answer whatever the stack says; else the innermost frame with a known sign.
    """
    running = [name for name in COMPILERS if name in programs]
    if running:
        return f"a compiler is at work ({', '.join(running)})"
    for line in reversed(stack):
        for word, meaning in SIGNS:
            if word in line:
                return meaning
    return "no known sign in its stack"


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
