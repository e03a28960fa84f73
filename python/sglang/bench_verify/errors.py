"""What ends a command with one line in place of a traceback."""

from __future__ import annotations


class BenchError(ValueError):
    """Something the caller can mend: an argument, a file, a row. The text names it and the remedy."""


class Interrupted(KeyboardInterrupt):
    """The process was asked to end (SIGTERM); handled like Ctrl-C."""
