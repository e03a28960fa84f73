"""What the fork changes, and the few calls through which patched upstream code reaches our modules.

Only the standard library is imported here: this package is loaded while ``sglang`` itself is still
being imported, and the doctor uses it on machines where torch does not load.

Patched upstream lines call ``around``, ``call``, ``wrap``, ``extra`` or ``load``. Each names its topic,
and each gives stock behaviour when the topic is listed in ``SGLANG_FORK_DISABLE``.
"""

from __future__ import annotations

from sglang.fork import counters, fallbacks
from sglang.fork.hooks import around, call, extra, load, wrap
from sglang.fork.topics import Report, TopicState, enabled, report, topics

__all__ = [
    "Report",
    "TopicState",
    "around",
    "call",
    "counters",
    "enabled",
    "extra",
    "fallbacks",
    "load",
    "report",
    "topics",
    "wrap",
]
