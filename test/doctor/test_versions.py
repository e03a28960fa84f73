"""The small part of version arithmetic that pins use, against ``packaging`` where it is installed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.verify_doctor.versions import Requirement, key, parse_requirement, satisfies

ORDER = (
    "1.0.dev1",
    "1.0a1",
    "1.0a2",
    "1.0b1",
    "1.0rc1",
    "1.0",
    "1.0.post1.dev2",
    "1.0.post1",
    "1.0.1",
    "1.1",
    "2",
)


def test_order() -> None:
    keys = [key(version) for version in ORDER]
    assert None not in keys
    assert keys == sorted(keys)  # type: ignore[type-var]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.11.0", "==2.11.0", True),
        ("2.11.0+cu130", "==2.11.0", True),
        ("2.12.0", "==2.11.0", False),
        ("2.11", "==2.11.0", True),
        ("0.6.15.post1", "==0.6.15.post1", True),
        ("0.6.15", "==0.6.15.post1", False),
        ("4.0.0b20", ">=4.0.0b18", True),
        ("4.0.0b2", ">=4.0.0b18", False),
        ("0.14.9", "<0.15,>=0.14.1", True),
        ("0.15", "<0.15,>=0.14.1", False),
        ("1.4.7", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("1.4.7", "==1.4.*", True),
        ("1.40", "==1.4.*", False),
        ("3", "!=3.*", False),
        ("1.0+a", "==1.0+b", False),
        ("1.0", "", True),
        ("what", "==1", None),
        ("1.0", "nonsense", None),
    ],
)
def test_satisfies(version: str, specifier: str, expected: bool | None) -> None:
    assert satisfies(version, specifier) is expected


def test_requirement_lines() -> None:
    parsed = parse_requirement("flashinfer_python[cu13]==0.6.15.post1")
    assert parsed == Requirement("flashinfer-python", "==0.6.15.post1")
    parsed = parse_requirement('kernels<0.15,>=0.14.1; sys_platform == "linux"')
    assert parsed == Requirement("kernels", "<0.15,>=0.14.1", 'sys_platform == "linux"')
    assert parse_requirement("numpy") == Requirement("numpy", "")
    assert parse_requirement("torch (==2.11.0)") == Requirement("torch", "==2.11.0")
    assert parse_requirement("x @ https://host/x.whl") is None


_numbers = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
_versions = st.builds(
    lambda release, pre, post, local: release + pre + post + local,
    _numbers,
    st.sampled_from(["", "a1", "b18", "rc2"]),
    st.sampled_from(["", ".post1", ".post3"]),
    st.sampled_from(["", "+cu130"]),
)


@settings(max_examples=300, deadline=None)
@given(_versions, _numbers, st.sampled_from(["==", "!=", ">=", "<="]))
def test_agrees_with_packaging(version: str, wanted: str, operator: str) -> None:
    specifiers = pytest.importorskip("packaging.specifiers")
    expected = specifiers.SpecifierSet(operator + wanted).contains(version, prereleases=True)
    # For "<=" the standard ignores a local part of the candidate, for which this subset does the same.
    assert satisfies(version, operator + wanted) is expected
