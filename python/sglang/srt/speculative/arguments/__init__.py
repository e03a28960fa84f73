"""Speculative options, target and draft checked against each other before any weight is loaded.

Everything here works on plain values: the options as integers, the two ``config.json`` files and the
tensor headers of the draft as dictionaries. ``hooks`` is the only module that knows upstream's classes.
A fault is an ``ArgumentFault`` (a ``ValueError``) whose text is one sentence with value, limit and remedy.
"""

from __future__ import annotations

from sglang.srt.speculative.arguments.faults import ArgumentFault

__all__ = ["ArgumentFault"]
