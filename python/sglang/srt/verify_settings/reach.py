"""Whether what the user set reaches the ranks: the launcher's record, and each rank's comparison with it.

The launcher notes every variable as the user set it, what a profile added and what the start changed, and passes
the outcome on in one variable. A rank compares that with what its own C library holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang.srt.verify_settings.native import PREFIXES, shown

CARRIER = "SGLANG_FORK_LAUNCHED_WITH"
USER, UPSTREAM = "you", "upstream's default"
# Upstream sets these whatever the user set, and gives no reason why the user's value would not do.
KEPT = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
# Why the start may change a variable that the user set.
REASONS = {
    "NCCL_CUMEM_ENABLE": "--enable-symm-mem needs buffers from CUDA's virtual memory calls",
    "NCCL_NVLS_ENABLE": "--enable-nccl-nvls or --enable-symm-mem asks for reductions inside NVLink switches",
    "NCCL_GRAPH_MIXING_SUPPORT": "decode context parallelism with symmetric memory asks for it",
    "NCCL_ALGO": "--enable-deterministic-inference fixes the order in which sums are formed",
}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: ``source`` is ``you``, ``profile NAME`` or ``upstream's default``."""

    value: str
    source: str
    why: str = ""


@dataclass(frozen=True)
class Change:
    """A variable that the user set and that the start changed. ``after`` is None where it was removed."""

    name: str
    before: str
    after: str | None
    why: str

    def text(self) -> str:
        """The change in one sentence."""
        became = "was removed" if self.after is None else f"became {self.after}"
        return f"{self.name}={self.before}, as you set it, {became}: {self.why}"


@dataclass
class Launch:
    """The launcher's record. ``origins`` holds every variable that a rank must find."""

    origins: dict[str, Origin] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def dump(self) -> str:
        """As text for ``CARRIER``."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    def expected(self) -> dict[str, str]:
        """Name to value that every rank must find."""
        return {name: origin.value for name, origin in self.origins.items()}


def load(text: str) -> Launch | None:
    """The record from ``CARRIER``; None where it is absent or damaged."""
    try:
        content: dict[str, Any] = json.loads(text)
        return Launch(
            {name: Origin(**origin) for name, origin in content["origins"].items()},
            [Change(**change) for change in content["changes"]],
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def carried(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that the record is about."""
    return {name: value for name, value in variables.items() if name.startswith(PREFIXES) and name != CARRIER}


def record(
    before: Mapping[str, str],
    after: Mapping[str, str],
    added: Mapping[str, Origin],
) -> Launch:
    """The launcher's record.

    Args:
        before: the environment as the user made it.
        after: the environment that the ranks will inherit.
        added: what a profile filled in.
    """
    mine = carried(before)
    theirs = carried(after)
    launch = Launch()
    for name, value in sorted(mine.items()):
        if theirs.get(name) != value:
            why = REASONS.get(name, "no reason is known")
            launch.changes.append(Change(name, value, theirs.get(name), why))
    for name, value in sorted(theirs.items()):
        if mine.get(name) == value:
            launch.origins[name] = Origin(value, USER)
        elif name in added and added[name].value == value:
            launch.origins[name] = added[name]
        else:
            launch.origins[name] = Origin(value, UPSTREAM, REASONS.get(name, "") if name in mine else "")
    return launch


def differences(expected: Mapping[str, str], seen: Mapping[str, str]) -> list[str]:
    """How one rank's environment differs from what the launcher passed on, one text a variable."""
    found = []
    for name, value in sorted(expected.items()):
        have = seen.get(name)
        if have == value:
            continue
        wanted = shown({name: value})[name]
        if have is None:
            found.append(f"{name}={wanted} did not arrive")
        else:
            found.append(f"{name} is {shown({name: have})[name]} instead of {wanted}")
    found += [
        f"{name}={shown({name: value})[name]} is set in the rank only"
        for name, value in sorted(carried(seen).items())
        if name not in expected
    ]
    return found
