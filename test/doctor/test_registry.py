"""What another part adds is run like our own, and a part that is broken costs nothing but itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sglang.verify_doctor import checks, registry
from sglang.verify_doctor.facts import document
from sglang.verify_doctor.findings import Level

GOOD = """
from sglang.verify_doctor.findings import note
from sglang.verify_doctor.registry import Contribution

CONTRIBUTION = Contribution(
    name="good",
    facts={"good": lambda: {"answer": 42}, "bad_probe": lambda: 1 / 0},
    checks=(lambda facts, mode: [note("good", f"{mode} {facts.get('good')}")],),
)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of contributions: a good one, one that cannot be imported, one without a contribution."""
    home = tmp_path / "some_contributions"
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / "good.py").write_text(GOOD)
    (home / "broken.py").write_text("import no_such_module")
    (home / "empty.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry.contributions, "__defaults__", ("some_contributions",))
    yield "some_contributions"
    for name in [name for name in sys.modules if name.startswith("some_contributions")]:
        del sys.modules[name]


def test_contributions_are_run(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, broken = registry.contributions()
    assert [other.name for other in found] == ["good"]
    assert [finding.level for finding in broken] == [Level.WARNING, Level.WARNING]
    assert "no_such_module" in broken[0].found and "CONTRIBUTION" in broken[1].found
    findings = checks.judge({"facts_version": 1, "good": {"answer": 42}}, "cpu")
    (mine,) = [finding for finding in findings if finding.group == "good"]
    assert mine.found == "cpu {'answer': 42}"
    assert len([finding for finding in findings if finding.group == "doctor"]) == 2


def test_facts_are_gathered(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for section in ("torch", "kernels"):
        monkeypatch.setattr(document.children, section, dict)
    facts = document.gather()
    assert facts["good"] == {"answer": 42}
    assert "ZeroDivisionError" in facts["bad_probe"]["error"]


def test_every_real_contribution_can_be_used() -> None:
    _, broken = registry.contributions()
    assert broken == []
