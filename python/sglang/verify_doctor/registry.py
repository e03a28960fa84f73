"""What other parts of the fork add to the doctor: facts, checks, rows of the deployment, a look at a server.

A part puts one module into ``sglang/verify_doctor/contributed/`` with a ``CONTRIBUTION``; nothing else is edited.
Such a module imports the standard library and the doctor only, because the doctor has to run where torch is
broken. What needs torch is named as text (``deployment``) and run in a child process.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from sglang.verify_doctor.findings import Finding, warning

Check = Callable[[Mapping[str, Any], str], list[Finding]]
PACKAGE = "sglang.verify_doctor.contributed"
ATTRIBUTE = "CONTRIBUTION"


@dataclass(frozen=True)
class Contribution:
    """What one part adds.

    Attributes:
        name: of the part, as in its topic.
        facts: section name to a probe that is bounded in time and returns JSON-ready data. A probe that raises
            leaves ``{"error": text}``.
        checks: pure functions ``(facts, mode) -> findings``, ``mode`` being ``cpu`` or ``gpu``.
        deployment: ``"package.module:function"``, called as ``function(deployment)`` in a process that has torch
            but perhaps no GPU, with ``sglang.verify_doctor.deployment.subject.Deployment``. Returns rows
            ``(about, what, why)``: what will run, and the reason, from the same functions that decide at run time.
        server: judges one rank's state of a running server (``spec_stats`` of ``/server_info``).
    """

    name: str
    facts: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    deployment: str = ""
    server: Callable[[Mapping[str, Any]], Iterable[Finding]] | None = None


def contributions(package: str = PACKAGE) -> tuple[list[Contribution], list[Finding]]:
    """Every contribution in name order, and a warning for each module that cannot be used."""
    found: list[Contribution] = []
    broken: list[Finding] = []
    for entry in pkgutil.iter_modules(importlib.import_module(package).__path__):
        try:
            found.append(_contribution(importlib.import_module(f"{package}.{entry.name}")))
        except Exception as error:
            broken.append(
                warning(
                    "doctor",
                    f"its part {entry.name} cannot be used ({type(error).__name__}: {error}), so its checks are missing",
                    "install the fork again; if that does not help, report this line",
                )
            )
    return found, broken


def _contribution(module: ModuleType) -> Contribution:
    value = getattr(module, ATTRIBUTE, None)
    if not isinstance(value, Contribution):
        raise TypeError(f"{module.__name__} has no {ATTRIBUTE}")
    return value
