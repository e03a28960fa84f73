"""One pair of servers for the session, one after the other: two cores carry one at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .cases import Case, reports
from .generator import SEED, drawn
from .nasty import nasty
from .pair import ask, runs_seen, scripted
from .servers import eagle_server, plain_server
from .sessions import converse

SHORT = 40


@dataclass(frozen=True)
class Asked:
    """What both servers answered. ``forced`` are the answers with dictated drafts, ``script`` their cases."""

    cases: Sequence[Case]
    plain: Sequence[Any]
    eagle: Sequence[Any]
    script: Sequence[Case]
    expected: Sequence[Any]
    forced: Sequence[Any]
    runs: Sequence[int]
    load_before: dict[str, Any]
    load_after: dict[str, Any]
    # The turns of a conversation: plain decoding's and EAGLE-3's.
    turns: tuple[list[Any], list[Any]]


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Ask everything once; the tests look at different sides of the answers."""
    count = int(os.environ.get("DIFFERENTIAL_REQUESTS", SHORT))
    drawn_cases = drawn(count, start=int(os.environ.get("DIFFERENTIAL_SEED", SEED)))
    cases = [*reports(), *nasty()[:: 1 if count > SHORT else 6], *drawn_cases]
    folder: Path = tmp_path_factory.mktemp("differential")
    with plain_server(folder) as server:
        plain = ask(server, cases)
        talk = converse(server)
    script = scripted(cases, plain)
    expected = [p for p in plain if isinstance(p["body"], dict) and p["body"].get("output_ids") is not None]
    with eagle_server(folder) as server:
        server.flush_cache()
        before = server.load()
        eagle = ask(server, cases)
        forced = ask(server, script)
        turns = (talk, converse(server))
        server.flush_cache()
        after = server.load()
    return Asked(cases, plain, eagle, script, expected, forced, runs_seen(forced), before, after, turns)
