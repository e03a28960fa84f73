"""The generator draws every feature that a request can have, often enough, and the same requests each time."""

from __future__ import annotations

import pytest

from .cases import GENERATE, Case
from .features import WANTED, counted, features
from .generator import drawn

FULL = 320


def test_every_feature_is_drawn_often_enough() -> None:
    found = counted(drawn(FULL))
    assert {name: found[name] for name, least in WANTED.items() if found[name] < least} == {}, found


def test_no_request_has_a_feature_that_nobody_counts() -> None:
    named = {name for case in drawn(FULL) for name in features(case)}
    assert named <= WANTED.keys()


def test_the_same_requests_each_time() -> None:
    assert drawn(40) == drawn(40)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_as_many_as_asked_for(count: int) -> None:
    assert len(drawn(count)) == count


def test_control_a_generator_without_a_feature_is_noticed() -> None:
    cases = [case for case in drawn(FULL) if "min_p" not in features(case)]
    assert counted(cases)["min_p"] < WANTED["min_p"]
    assert features(Case("x", GENERATE, {"text": "a", "sampling_params": {"min_p": 0.2}})) >= {"min_p"}
