"""Gathering all sections, and the file they are kept in."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.verify_doctor import registry
from sglang.verify_doctor.facts import children, fork, host, load, nccl, nvidia, packages, pci, sysfs
from sglang.verify_doctor.facts.reading import section

VERSION = 1
# The facts of eight GPUs behind switches are 40 KB.
MOST_BYTES = 64 << 20
MAKE = "make such a file with `python -m sglang.verify_doctor --save-facts FILE`"

Facts = dict[str, Any]

__all__ = ["VERSION", "Facts", "check_place", "gather", "read", "section", "write"]


def gather(*, under_load: bool = False) -> Facts:
    """Look at this machine. Takes as long as importing torch once; every probe is bounded in time.

    ``under_load`` adds a section ``load``: clocks, power and link while idle GPUs work for 3 s.
    """
    sections: dict[str, Callable[[], Any]] = {
        "python": lambda: {"version": platform.python_version()},
        "host": host.gather,
        "packages": packages.gather,
        "torch": children.torch,
        "kernels": children.kernels,
        "nvidia": nvidia.gather,
        "pci": pci.gather,
        "sysfs": sysfs.gather,
        "environment": lambda: nccl.environment(os.environ),
        "settings": nccl.gather,
        "fork": fork.gather,
    }
    for other in registry.contributions()[0]:
        sections |= {name: look for name, look in other.facts.items() if name not in sections}
    facts: Facts = {"facts_version": VERSION, "origin": "recorded"} | {
        name: _guarded(look) for name, look in sections.items()
    }
    if under_load:
        facts["load"] = _guarded(lambda: load.gather(list(section(facts, "nvidia").get("gpus") or [])))
    return facts


def _guarded(look: Callable[[], Any]) -> Any:
    """A section, or what went wrong: one broken probe must not cost the rest of the report."""
    try:
        return look()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def read(file: Path) -> Facts:
    """Facts from a file that ``write`` or ``--json`` made.

    Raises:
        ValueError: no JSON object, more than facts can be, or facts of another form than this doctor knows.
        OSError: the file cannot be read.
    """
    # Bounded, because a path may as well name a device or a model's weights.
    with file.open("rb") as stream:
        raw = stream.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{file} is larger than {MOST_BYTES >> 20} MiB, which no facts are; {MAKE}")
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); {MAKE}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); {MAKE}") from error
    facts = content.get("facts", content) if isinstance(content, dict) else None
    if not isinstance(facts, dict) or "facts_version" not in facts:
        raise ValueError(f"{file} holds no facts; {MAKE}")
    if facts["facts_version"] != VERSION:
        raise ValueError(
            f"{file} has facts of version {str(facts['facts_version'])[:40]}, this doctor reads version {VERSION}; "
            "record them again, or use the doctor that made them"
        )
    return facts


def check_place(file: Path) -> None:
    """Whether facts can be kept there, asked before a look at the machine that takes its time.

    Raises:
        OSError: the file cannot be written. What is there stays as it is.
    """
    existed = file.exists()
    with file.open("a", encoding="utf-8"):
        pass
    if not existed:
        file.unlink()


def write(facts: Facts, file: Path) -> None:
    """Keep facts in a file."""
    file.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
