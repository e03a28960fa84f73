"""What the doctor says about the one-shot all-reduce and about a start of several ranks, before there is one."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, note, ok, warning
from sglang.verify_doctor.registry import Contribution

#: A name that takes longer than this to resolve is asked for by every gloo group again.
NAME_S = 2.0
SETTING, TABLE = "SGLANG_FORK_ALL_REDUCE", "SGLANG_FORK_ALL_REDUCE_TABLE"
PROTOCOL = "SGLANG_FORK_ALL_REDUCE_PROTOCOL"


def gather() -> dict[str, Any]:
    """How long the machine's own name takes, the measured tables of this user, and the one that a setting names.

    Bounded in time. Whole documents, so that saved facts say what a server would do with them.
    """
    from sglang.srt.distributed.one_shot import fusion_build, table_file

    named = os.environ.get(TABLE, "").strip()
    return {
        "name_s": _name_seconds(),
        "tables": tables(table_file.folder()),
        "named": (table_file.recorded([Path(named)]) if named else [None])[0],
        "setting": os.environ.get(SETTING, "").strip() or "auto",
        "protocol": os.environ.get(PROTOCOL, "").strip() or "auto",
        "start_probe": _last_probe(),
        "fusion": fusion_build.look(),
    }


def _last_probe() -> dict[str, Any] | None:
    """The last run of the start probe: when, and its outcomes."""
    from sglang.bench_all_reduce import start_probe

    path = start_probe.last()
    found = start_probe.load(path)
    if not found:
        return None
    taken = time.strftime("%Y-%m-%d", time.localtime(path.stat().st_mtime))
    return {"taken": taken, "outcomes": [dataclasses.asdict(entry) for entry in found]}


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
    """The measured tables in a folder: ``file`` with its ``document``, or with the ``problem`` of reading it."""
    from sglang.srt.distributed.one_shot import table_file

    return table_file.recorded(sorted(folder.glob("*.json")))


def find(facts: Mapping[str, Any], key: Any) -> Any:
    """The ``table_file.Found`` of a server on the machine of these facts, for ``key`` (a ``policy.Key``)."""
    from sglang.srt.distributed.one_shot import policy, table_file

    found = section(facts, "all_reduce")
    entry = found.get("named")
    if not entry:
        name = table_file.default_path(key).name
        entry = next((each for each in found.get("tables") or [] if Path(each["file"]).name == name), None)
    if not entry:
        return table_file.Found(policy.shipped(key), f"not measured on this machine; {table_file.CURE}")
    if "problem" in entry:
        return table_file.Found(policy.shipped(key), entry["problem"], refused=True)
    return table_file.chosen(key, entry["document"], entry["file"])


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
    """Who reduces is a matter of a table: one that was measured here, or a careful default. What is refused is named."""
    gpus = section(facts, "nvidia").get("gpus") or []
    found = section(facts, "all_reduce")
    if mode != "gpu" or len(gpus) < 2 or not found:
        return []
    protocol = str(found.get("protocol", "auto"))
    told = (
        []
        if protocol == "auto"
        else [note("all-reduce", f"{PROTOCOL}={protocol}: messages of one hop go that way")]
    )
    if found.get("setting", "auto") != "auto":
        words = f"{SETTING}={found['setting']}: no table is asked"
        return [note("all-reduce", words), *(told if found["setting"] != "off" else [])]
    named = found.get("named")
    sound, refused = _read(facts, [named] if named else found.get("tables") or [], bool(named))
    findings = [
        warning("all-reduce", f"a table is refused, and a default decides: {problem}", cure)
        for problem, cure in refused
    ]
    if sound:
        return [*findings, ok("all-reduce", f"measured on this machine for {', '.join(sound)}"), *told]
    return [*(findings or _unmeasured(facts)), *told]


def _read(
    facts: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], named: bool
) -> tuple[list[str], list[tuple[str, str]]]:
    """What was measured on this machine, and (problem, cure) of each file that a server would refuse.

    A file of another machine is a problem only where a setting names it: the cache may hold those of several.
    """
    from sglang.srt.distributed.one_shot import policy, table_file

    gpus = section(facts, "nvidia").get("gpus") or []
    driver = str(section(facts, "nvidia").get("driver") or "")
    sound: list[str] = []
    refused: list[tuple[str, str]] = []
    for entry in entries:
        problem = str(entry.get("problem") or "")
        if not problem:
            try:
                table = table_file.parse(entry["document"], entry["file"])
                key = table.key
            except table_file.TableError as error:
                problem = str(error)
            else:
                here = dataclasses.replace(key, gpu=str(gpus[0].get("name") or ""), driver=driver)
                differing = table_file.differences(key, here)
                if not differing:
                    known = any(policy.PACKETS in point.us for point in table.points)
                    lacks = "" if known else "; packets were not measured and are not taken"
                    sound.append(f"{key.ranks} ranks over {key.link} ({entry['file']}{lacks})")
                elif named:
                    problem = f"{entry['file']}: measured on another machine ({differing}); {table_file.CURE}"
        if problem:
            what, _, cure = problem.rpartition("; ")
            refused.append((what, cure + (f", or unset {TABLE}" if named else "")))
    return sound, refused


def _unmeasured(facts: Mapping[str, Any]) -> list[Finding]:
    far = nvidia.farthest([list(row) for row in section(facts, "nvidia").get("paths") or []])
    if far == "NV":
        return [
            note(
                "all-reduce",
                "upstream's, over NVLink; ours was faster for small messages on two H200: `python -m "
                "sglang.bench_all_reduce --write` measures this machine and lets the faster one reduce",
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
    """Which step of a start of several ranks stands still, by the last probe of this machine.

    Without one: the set-up in which upstream's start stood still for minutes, with what is known about it.
    """
    probe = section(facts, "all_reduce").get("start_probe")
    if probe:
        return _probed(probe)
    gpus = section(facts, "nvidia").get("gpus") or []
    virtual = "hypervisor" in (section(facts, "host", "cpu").get("features") or [])
    pair = nvidia.capability(gpus[0].get("capability")) if gpus else None
    if mode != "gpu" or len(gpus) < 2 or not virtual or pair is None or pair[0] not in (9, 10):
        return []
    return [
        note(
            "ranks",
            "on such a virtual machine a start with two ranks stood still for minutes after its first NCCL barrier; that "
            "FlashInfer's fused all-reduce was compiled there is enough of a cause and not proven; a server of this fork says after 60 s where it stands, `python -m "
            "sglang.bench_all_reduce.start_probe` tries each step, and --enforce-disable-flashinfer-allreduce-fusion "
            "leaves that step out",
        )
    ]


def _probed(probe: Mapping[str, Any]) -> list[Finding]:
    from sglang.bench_all_reduce import start_probe

    outcomes = [start_probe.Outcome(**entry) for entry in probe["outcomes"]]
    bad = [
        entry for entry in outcomes if entry.variant == start_probe.BASE and entry.state in start_probe.BAD
    ]
    if not bad:
        tried = sum(entry.variant == start_probe.BASE and entry.state == "ok" for entry in outcomes)
        return [
            ok("ranks", f"a start of two ranks: {tried} steps tried on {probe['taken']}, none stood still")
        ]
    return [
        warning(
            "ranks",
            f"a start of two ranks stood still or failed ({probe['taken']}): {start_probe.conclude(outcomes)[0]}; "
            f"{bad[0].detail}",
            start_probe.cure(outcomes),
        )
    ]


def fusion(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """A first start of several ranks that compiles FlashInfer's fused all-reduce looks like one that hangs.

    On SM90 only: on SM100 upstream takes another backend, with a module of its own.
    """
    from sglang.srt.distributed.one_shot import fusion_build
    from sglang.srt.distributed.one_shot.start_places import NO_FUSION

    found = section(facts, "all_reduce").get("fusion")
    gpus = section(facts, "nvidia").get("gpus") or []
    pair = nvidia.capability(gpus[0].get("capability")) if gpus else None
    if mode != "gpu" or len(gpus) < 2 or not found or found["built"] or pair is None or pair[0] != 9:
        return []
    what = f"FlashInfer's fused all-reduce ({fusion_build.MODULE}), which upstream switches on for DeepSeek-type models"
    sources, wanted = found["sources"], found["wanted"]
    if sources < wanted or not found["compiler"]:
        why = f"{sources} of {wanted} sources are installed" if sources < wanted else "there is no nvcc"
        return [
            warning(
                "ranks",
                f"{what}, is not compiled and cannot be: {why}",
                f"start with {NO_FUSION}, or install what is missing",
            )
        ]
    return [
        warning(
            "ranks",
            f"{what}, will be compiled at the first start of several ranks: {wanted} sources, minutes without a log line "
            "behind the first NCCL barrier",
            f"compile it before: {fusion_build.COMMAND}; or start with {NO_FUSION}",
        )
    ]


CONTRIBUTION = Contribution(
    name="one-shot-all-reduce", facts={"all_reduce": gather}, checks=(name, table, start, fusion)
)
