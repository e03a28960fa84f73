"""Progress on a terminal: a bar where rich is installed, one line a step where it is not."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Report = Callable[[str, int, int], None]


def await_file(path: str, limit_s: float) -> None:
    """Wait until ``path`` exists, at most ``limit_s`` seconds: other work on the machine is done. "" does not wait."""
    until = time.monotonic() + limit_s
    while path and not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.2)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Report]:
    """A function ``report(text, done, total)`` that shows how far ``title`` has come."""
    bar: Any = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            bar = Progress(*columns, console=Console(stderr=True))
    if bar is None:

        def line(text: str, done: int, total: int) -> None:
            print(f"{title} [{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield line
        return
    with bar:
        task = bar.add_task(title, total=1)

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {text}", completed=done, total=total)

        yield show
