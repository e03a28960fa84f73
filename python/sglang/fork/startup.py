"""The start-up line: which fork this is and which topics are in force, once per server."""

from __future__ import annotations

import logging

from sglang.fork.topics import report

logger = logging.getLogger("sglang.fork")


def log_report() -> None:
    """Write the report as one line to the server's log."""
    logger.info("%s", report().line())
