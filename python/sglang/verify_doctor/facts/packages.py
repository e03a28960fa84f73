"""Installed packages against the pins that the installed ``sglang`` and ``torch`` state."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from sglang.verify_doctor.versions import parse_requirement

# Torch pins the Triton that it was tested with; sglang pins the rest.
OWNERS = ("sglang", "torch")
# Looked at whether pinned or not.
ALSO = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "triton", "rich", "nvidia-ml-py")


def gather() -> dict[str, Any]:
    """``{"pins": [{owner, name, specifier, installed}], "installed": {name: version}, "owners": {name: version}}``.

    Requirements for an extra or for another platform are left out.
    """
    owners: dict[str, str | None] = {}
    pins = []
    for owner in OWNERS:
        owners[owner] = installed(owner)
        for line in _requires(owner):
            requirement = parse_requirement(line)
            if requirement is None or not applies(requirement.marker):
                continue
            pins.append(
                {
                    "owner": owner,
                    "name": requirement.name,
                    "specifier": requirement.specifier,
                    "installed": installed(requirement.name),
                }
            )
    return {"owners": owners, "pins": pins, "installed": {name: installed(name) for name in ALSO}}


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def applies(marker: str) -> bool:
    """Whether a requirement is meant for this interpreter and platform.

    Markers are evaluated by ``packaging`` where it is installed. Without it a marker about an extra or another
    processor than the common ones counts as not meant.
    """
    if not marker:
        return True
    try:
        from packaging.markers import InvalidMarker, Marker
    except ImportError:
        return "extra" not in marker and "machine" not in marker and sys.platform == "linux"
    try:
        return bool(Marker(marker).evaluate({"extra": ""}))
    except InvalidMarker:
        return False
