"""Values of settings: of ours as Python reads them, of NCCL's as C does, and what the doctor makes of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.verify_settings.declare import Setting
from sglang.verify_doctor import checks
from sglang.verify_doctor.facts import document
from sglang.verify_doctor.findings import Level

FACTS = Path(__file__).parent / "facts"


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("flag", "1", None),
        ("flag", "off", None),
        ("flag", "2", "neither 1 nor 0"),
        ("int", "7", None),
        ("int", "7.5", "whole number"),
        ("int", "0", "below 1"),
        ("int", "99", "above 64"),
        ("float", "1.5", None),
        ("int", "1_0", "whole number"),
        ("int", "\uff11", "whole number"),
        ("int", "9" * 5000, "whole number"),
        ("float", "x", "not a number"),
        ("float", "nan", "finite"),
        ("float", "1e999", "finite"),
        ("choice", "a", None),
        ("choice", "b", "none of a"),
        ("text", "anything", None),
    ],
)
def test_kinds(kind: str, value: str, says: str | None) -> None:
    entry = Setting("X", kind, "", "Means", "us", ("a",), 1, 64)  # type: ignore[arg-type]
    problem = entry.problem(value)
    assert problem is None if says is None else problem is not None and says in problem


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("flag", "1", None),
        ("flag", " 0 ", None),
        ("flag", "true", "reads the digits in front only"),
        ("flag", "\u0661", "reads the digits in front only"),
        ("flag", "2", "neither 1 nor 0"),
        ("int", "0x10", None),
        ("int", "010", None),  # Eight.
        ("int", "0100", None),
        ("int", "0200", "above 64"),
        ("int", "-2", "below 1"),
        ("int", "16M", "reads the digits in front only"),
        ("int", "9" * 5000, "reads the digits in front only"),
        ("choice", "a", None),
        ("choice", " a ", "blanks"),
        ("choice", "A", "none of a"),
        ("choice", "\uff41", "none of a"),
        ("text", " any\tthing\u00b5 ", None),
    ],
)
def test_values_as_nccl_reads_them(kind: str, value: str, says: str | None) -> None:
    """NCCL reads numbers with C's strtoll and compares words as they stand, so that ``true`` switches nothing on."""
    problem = Setting("NCCL_X", kind, "", "Means", "NCCL", ("a",), 1 if kind == "int" else None, 64).problem(
        value
    )  # type: ignore[arg-type]
    assert problem is None if says is None else problem is not None and says in problem


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NCCL_P2P_DISABLE", "true", Level.WARNING),
        ("NCCL_P2P_LEVEL", "SYS ", Level.WARNING),
        ("NCCL_P2P_LEVEL", "\uff33\uff39\uff33", Level.WARNING),
        ("NCCL_P2P_LEVEL", "", None),
        ("NCCL_ALGO", "Ring, Tree", None),
        ("SGLANG_SPEC_STATS_EVERY", "often", Level.FAULT),
        ("SGLANG_SPEC_STATS_EVERY", "-1", Level.FAULT),
        ("SGLANG_SPEC_STATS_EVERY", "", None),
    ],
)
def test_a_value_that_cannot_be_meant(name: str, value: str, level: Level | None) -> None:
    """With a bad value of the fork's own the server does not start, so neither does the doctor call it ready."""
    facts = document.read(FACTS / "h200_x2_nvlink.json")
    facts["environment"] = {name: value}
    told = [f for f in checks.judge(facts) if f.about == "settings" and f.level is not Level.NOTE]
    if level is None:
        assert told == []
    else:
        (found,) = told
        assert found.level is level and found.found.startswith(f"{name}={value} ") and found.cure


@pytest.mark.parametrize("word", ["C2C", "XGMI", "N/A", "NVX", "nv4", ""])
def test_a_path_of_an_unknown_kind_gets_no_profile(word: str) -> None:
    """Which of two paths is farther is not known, and a wrong level can hang the first all-reduce."""
    from sglang.srt.verify_settings import profiles

    facts = document.read(FACTS / "rtxpro6000_x8_switches.json")
    facts["nvidia"]["paths"][0][7] = facts["nvidia"]["paths"][7][0] = word
    chosen, why = profiles.choose(profiles.links(facts))
    assert chosen is None and word in why and "not known" in why
    text = " ".join(f.found for f in checks.judge(facts))
    assert f"a path between two GPUs {word}, which is not known" in text
