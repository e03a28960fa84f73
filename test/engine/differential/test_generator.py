"""The generator draws every feature that a request can have, often enough, and the same requests each time."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

import pytest
from hypothesis.internal import constants_ast
from hypothesis.internal.conjecture import providers

from . import generator
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


def test_other_modules_change_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants of the modules that happen to be loaded are no part of the seed."""
    before = drawn(40)
    (tmp_path / "full_of_constants.py").write_text(f"VALUES = {list(range(7, 600, 3))}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(constants_ast, "is_local_module_file", lambda file: "full_of" in str(file))
    monkeypatch.setattr(providers, "is_local_module_file", lambda file: "full_of" in str(file))
    importlib.import_module("full_of_constants")
    assert drawn(40) == before
    monkeypatch.setattr(generator, "_only_the_seed_counts", contextlib.nullcontext)
    assert drawn(40) != before


@pytest.mark.parametrize("count", [1, 7, 40])
def test_as_many_as_asked_for(count: int) -> None:
    assert len(drawn(count)) == count


def test_control_a_generator_without_a_feature_is_noticed() -> None:
    cases = [case for case in drawn(FULL) if "min_p" not in features(case)]
    assert counted(cases)["min_p"] < WANTED["min_p"]
    assert features(Case("x", GENERATE, {"text": "a", "sampling_params": {"min_p": 0.2}})) >= {"min_p"}
