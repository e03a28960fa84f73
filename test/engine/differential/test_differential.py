"""Plain decoding against EAGLE-3 over HTTP: every field that should be equal is (E1 to E16).

``make test`` asks the requests of the public reports and 40 generated ones; ``make test-differential`` asks 320.
Everything is asked twice under EAGLE-3: with the trained draft, and with drafts dictated so that runs of 1, 2 and
3 all occur.
"""

from __future__ import annotations

import pytest

from .cases import reports
from .conftest import Asked
from .features import endings
from .pair import Finding, findings

pytestmark = pytest.mark.server
REPORTS = [case.name for case in reports()]


def told(found: list[Finding]) -> str:
    return "\n".join([f"{len(found)} answers differ", *map(str, found[:10])])


def test_trained_draft(asked: Asked) -> None:
    found = findings(asked.cases, asked.plain, asked.eagle)
    assert not found, told(found)


def test_dictated_drafts(asked: Asked) -> None:
    found = findings(asked.script, asked.expected, asked.forced)
    assert not found, told(found)


@pytest.mark.parametrize("name", REPORTS)
def test_report(asked: Asked, name: str) -> None:
    """The requests of the public reports, one test each."""
    at = [case.name for case in asked.cases].index(name)
    found = findings([asked.cases[at]], [asked.plain[at]], [asked.eagle[at]])
    assert not found, told(found)


def test_all_run_lengths_occurred(asked: Asked) -> None:
    """Without this, equality above might rest on runs of one token."""
    assert len(asked.runs) == 3
    assert min(asked.runs) >= 10, asked.runs


def test_only_poisoned_requests_are_server_errors(asked: Asked) -> None:
    """A12: NaN ends its own request with 500 and a reason, while its neighbours in the batch are answered."""
    for answers in (asked.plain, asked.eagle):
        for case, answer in zip(asked.cases, answers, strict=True):
            if case.name.startswith("A12"):
                assert answer["status"] == 500 and "NaN or infinite" in answer["body"]["message"], answer
            else:
                assert answer["status"] < 500, (str(case), answer)


def test_ends_of_every_kind_occurred(asked: Asked) -> None:
    """Without this, equality might rest on answers that all end by their length."""
    found = endings(asked.eagle)
    print("endings:", dict(found), "runs:", list(asked.runs))
    assert min(found[kind] for kind in ("length", "stop on a token", "stop on a text")) >= 10, found


def test_sessions_go_on_behind_the_end_of_a_run(asked: Asked) -> None:
    plain, eagle = asked.turns
    assert eagle == plain


def test_kv_returned(asked: Asked) -> None:
    for field in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs"):
        assert asked.load_after[field] == asked.load_before[field] == 0
