"""The fork's own report, and what its settings say."""

from __future__ import annotations

import os
from typing import Any

from sglang.fork.topics import DISABLE_VARIABLE, report


def gather() -> dict[str, Any]:
    """Base, version and topics; with a misspelt switch also the sentence that a start would end in."""
    facts: dict[str, Any] = {"disable": os.environ.get(DISABLE_VARIABLE, "")}
    try:
        facts |= report().as_dict()
    except SystemExit:
        # The start refuses an unknown topic by leaving the interpreter; the doctor has to survive to tell.
        facts["error"] = f"{DISABLE_VARIABLE}={facts['disable']} names a topic that this build does not have"
    return facts
