"""How a rank ends when another one is lost: waits are aborted, the parent is told, and nothing is cleaned up."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable

from sglang.srt.distributed.one_shot.watch import Loss

logger = logging.getLogger("sglang.fork")

#: Exit status of a rank that ends because of another one.
STATUS = 75


def end(loss: Loss, rank: int, abort: Callable[[], None] | None = None) -> None:
    """Log the loss and this rank's stacks, release kernels that wait, and leave. Does not return.

    A clean exit would wait for the device or for a collective; both may never end. The parent is told the way
    upstream tells it (SIGQUIT), so that the server goes down instead of answering from half of its ranks.
    """
    logger.error("%s", loss.sentence(rank))
    sys.stderr.write(f"{loss.sentence(rank)}\n")
    faulthandler.dump_traceback(all_threads=True)
    if abort is not None:
        try:
            abort()
        except Exception as error:
            logger.error("waiting kernels could not be aborted: %s", error)
    _flush()
    _tell_parent()
    os._exit(STATUS)


def _flush() -> None:
    # A handler whose stream is closed must not keep the rank: the thread would die here and the rank wait on.
    for stream in (*logging.getLogger().handlers, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()


def _tell_parent() -> None:
    import multiprocessing

    # Only a worker has a parent that waits for it; a rank started by hand must not signal somebody's shell.
    if multiprocessing.parent_process() is not None:
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), signal.SIGQUIT)
