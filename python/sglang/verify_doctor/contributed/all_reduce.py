"""What the doctor says about the one-shot all-reduce and about a start of several ranks, before there is one."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, note, ok, warning
from sglang.verify_doctor.registry import Contribution

#: A name that takes longer than this to resolve is asked for by every gloo group again.
NAME_S = 2.0
SCHEMA = "all-reduce-table/1"


def gather() -> dict[str, Any]:
    """How long the machine's own name takes, and the measured tables of this user. Bounded in time."""
    return {"name_s": _name_seconds(), "tables": tables(_folder()), "setting": _setting()}


def _setting() -> str:
    return os.environ.get("SGLANG_FORK_ALL_REDUCE", "").strip() or "auto"


def _folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "sglang-fork" / "all-reduce"


def _name_seconds(limit_s: float = 10.0) -> float | None:
    """Seconds until the machine's own name is an address; None where it never is, the limit where it takes longer."""
    answer: list[float | None] = [limit_s]

    def look() -> None:
        start = time.monotonic()
        try:
            socket.gethostbyname(platform.node())
            answer[0] = time.monotonic() - start
        except OSError:
            answer[0] = None

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0]


def tables(folder: Path) -> list[dict[str, Any]]:
    """Keys of the measured tables in a folder; files that are none are left out."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and document.get("schema") == SCHEMA:
            found.append({**document["key"], "taken": document.get("taken", "")})
    return found


def name(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Every group of ranks resolves the machine's own name; without an answer each of them waits."""
    found = section(facts, "all_reduce")
    if "name_s" not in found or nvidia.count(facts) < 2:
        return []
    seconds = found["name_s"]
    if seconds is not None and seconds <= NAME_S:
        return []
    how = "is not to be resolved" if seconds is None else f"takes {seconds:.0f} s to resolve"
    return [
        warning(
            "ranks",
            f"the machine's own name {how}, and each process group of a start asks for it",
            "put the name into /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that ranks meet on",
        )
    ]


def table(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Who reduces is a matter of a table; one that was measured here, or a careful default."""
    gpus = section(facts, "nvidia").get("gpus") or []
    found = section(facts, "all_reduce")
    if mode != "gpu" or len(gpus) < 2 or not found:
        return []
    if found.get("setting", "auto") != "auto":
        return [note("all-reduce", f"SGLANG_FORK_ALL_REDUCE={found['setting']}: no table is asked")]
    mine = [
        entry
        for entry in found.get("tables") or []
        if entry.get("gpu") == gpus[0].get("name")
        and entry.get("driver") == section(facts, "nvidia").get("driver")
    ]
    if mine:
        ranks = ", ".join(f"{entry['ranks']} ranks over {entry['link']}" for entry in mine)
        return [ok("all-reduce", f"measured on this machine for {ranks}")]
    far = nvidia.farthest([list(row) for row in section(facts, "nvidia").get("paths") or []])
    if far == "NV":
        return [
            note(
                "all-reduce",
                "upstream's, over NVLink; `python -m sglang.bench_all_reduce` compares it with ours",
            )
        ]
    return [
        note(
            "all-reduce",
            f"not measured on this machine ({far or 'path not known'}), so a careful default decides; "
            "`python -m sglang.bench_all_reduce --write` measures it",
        )
    ]


def start(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The set-up in which upstream's start stood still for minutes, with what is known about it."""
    gpus = section(facts, "nvidia").get("gpus") or []
    virtual = "hypervisor" in (section(facts, "host", "cpu").get("features") or [])
    pair = nvidia.capability(gpus[0].get("capability")) if gpus else None
    if mode != "gpu" or len(gpus) < 2 or not virtual or pair is None or pair[0] not in (9, 10):
        return []
    return [
        note(
            "ranks",
            "on such a virtual machine a start with two ranks stood still for minutes after its first NCCL barrier, cause "
            "not established; a server of this fork says after 60 s where it stands, `python -m "
            "sglang.bench_all_reduce.start_probe` tries each step, and --enforce-disable-flashinfer-allreduce-fusion "
            "leaves out the step that is suspected first",
        )
    ]


CONTRIBUTION = Contribution(
    name="one-shot-all-reduce", facts={"all_reduce": gather}, checks=(name, table, start)
)
