"""Negative controls over HTTP: with the topics off, the suite must find the faults that they repair."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Asked
from .pair import ask, findings
from .servers import eagle_server

pytestmark = [pytest.mark.server, pytest.mark.slow]
# Topic to reports that must fail without it. Topics whose absence ends the scheduler are left out: their
# component tests hold the control.
CONTROLS = {
    "run-end": ["E1 stop token before the cap", "E1 stop text before the cap"],
    "run-penalties": ["E7 frequency penalty", "E7 all penalties", "E8 minimum"],
    "run-processors": ["E6 processor on every row"],
    "run-sampling": ["E6 min_p", "E6 processor with a seed"],
    "run-hidden-states": ["hidden states"],
    "run-limits": ["limit of the context"],
    "run-nonfinite": ["A12 NaN after 3 tokens"],
}


def test_faults_come_back(asked: Asked, tmp_path: Path) -> None:
    """All topics off at once: one server start for all of them."""
    wanted = [
        at for at, case in enumerate(asked.cases) if any(case.name in names for names in CONTROLS.values())
    ]
    with eagle_server(tmp_path, off=",".join(CONTROLS)) as server:
        # One at a time: a wrong answer must be the request's own fault.
        answers = [ask(server, [asked.cases[at]])[0] for at in wanted]
    found = {
        f.case.name
        for f in findings([asked.cases[at] for at in wanted], [asked.plain[at] for at in wanted], answers)
    }
    missing = {topic: [name for name in names if name not in found] for topic, names in CONTROLS.items()}
    caught = {topic: names for topic, names in CONTROLS.items() if len(missing[topic]) < len(names)}
    assert caught.keys() == CONTROLS.keys(), missing
