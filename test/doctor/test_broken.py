"""The doctor against what is broken: facts of any form, tools that lie or hang, a pipe that closes."""

from __future__ import annotations

import copy
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.bench_verify import gpu
from sglang.verify_doctor import checks, report, server
from sglang.verify_doctor.__main__ import main
from sglang.verify_doctor.facts import document, nvidia, pci
from sglang.verify_doctor.findings import Finding, Level, worst

FACTS = Path(__file__).parent / "facts"
MACHINES = sorted(path.stem for path in FACTS.glob("*.json"))
WRONG: tuple[Any, ...] = (None, "x", "", 3, -1, 1e308, True, [], {}, [None], ["x"], {"a": 1}, [[1]], [{}])
CHANGES = 80


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in items:
        yield (*path, name)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, name))


def judged(facts: dict[str, Any]) -> list[Finding]:
    """Both modes and the chosen one, and the report in both widths."""
    found: list[Finding] = []
    for mode in ("cpu", "gpu", None):
        findings = checks.judge(facts, mode)
        for width in (60, 200):
            assert report.plain(findings, mode or "gpu", width, facts)
        found += findings
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_facts_of_any_form(name: str) -> None:
    """No traceback, and every warning and fault with its cure, whatever stands at one place of the facts."""
    whole = document.read(FACTS / f"{name}.json")
    found, drawn = list(places(whole)), random.Random(name)
    for _ in range(CHANGES):
        broken = copy.deepcopy(whole)
        path = drawn.choice(found)
        holder: Any = broken
        for step in path[:-1]:
            holder = holder[step]
        if drawn.random() < 0.2:
            del holder[path[-1]]
        else:
            holder[path[-1]] = drawn.choice(WRONG)
        findings = judged(broken)
        assert all(f.cure for f in findings if f.level in (Level.WARNING, Level.FAULT)), path
        json.dumps([f.as_dict() for f in findings])


def test_a_check_that_stumbles_is_named_and_costs_only_itself() -> None:
    """Control of the guard: without it the whole report would be lost."""
    whole = document.read(FACTS / "h200_x2_nvlink.json")
    broken = copy.deepcopy(whole) | {"nvidia": {"tool": True, "driver": "580.1", "gpus": [3, 4]}}
    findings = checks.judge(broken)
    told = [f for f in findings if f.about == "facts"]
    assert told and all("cannot judge" in f.found for f in told)
    assert len(findings) > len(told)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_file(share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (FACTS / "h200_x1_vm.json").read_text(encoding="utf-8")
    file = tmp_path / "facts.json"
    file.write_text(text[: int(len(text) * share)], encoding="utf-8")
    assert main(["--from", str(file)]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"facts_version": "1"}',
        b'{"facts": [], "facts_version": 1}',
        b"3",
        b'{"facts_version": 1, "x": ' + b"9" * 5000 + b"}",
        b" " * (document.MOST_BYTES + 1),
        b'{"facts_version": ' + b'"' + b"2" * 100_000 + b'"}',
    ],
    ids=[
        "no text",
        "too deep",
        "version",
        "facts are a list",
        "a number",
        "too many digits",
        "too large",
        "a long version",
    ],
)
def test_other_files(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "facts.json"
    file.write_bytes(content)
    assert main(["--from", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    # What is wrong with which file, and what to do.
    assert line.startswith(f"verify_doctor: error: {file} ") and len(line) < 400
    assert "make such a file" in line or "record them again" in line


def test_facts_that_name_no_real_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deployment on facts from which no machine can be made is told, not raised."""
    facts = document.read(FACTS / "h200_x2_nvlink.json")
    facts["nvidia"]["gpus"][0]["memory_mib"] = "much"
    file = tmp_path / "facts.json"
    document.write(facts, file)
    assert main(["--from", str(file), "--model-path", "nowhere"]) == 1
    text = capsys.readouterr().out
    assert "FAULT    deployment" in text and "describe no machine to plan for" in text
    assert "cure: record them again on that machine" in text


def test_code_of_a_checkpoint_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor does not run it unasked, and says what the server would say."""
    config = {"architectures": ["Own"], "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    assert main(["--from", str(FACTS / "h200_x1_vm.json"), "--model-path", str(tmp_path)]) == 1
    assert "--trust-remote-code if you trust" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


GOOD_ROW = "NVIDIA H200, 580.95.05, 9.0, 00000000:{:02x}:00.0, 143771, 700, 345, 1980, 5, 5, 16, 16, Disabled, 76, 3201, 3201, 28, 0, 0"
HANGS = "exec sleep 60"
Tools = Callable[..., None]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Puts scripts in the place of programs, on a path that holds nothing else but a shell's needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "cat", "printf"):
        (folder / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(gpu, "PROBE_SECONDS", 120.0)

    def put(**scripts: str) -> None:
        for name, body in scripts.items():
            file = folder / name.replace("_", "-")
            file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return put


@pytest.mark.parametrize(
    "body",
    [
        HANGS,
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        "echo 'Failed to initialize NVML: Driver/library version mismatch'",
        "printf '\\377\\376\\000garbage'",
        "kill -SEGV $$",
        "exit 0",
    ],
    ids=["hangs", "fails", "other words", "no text", "crashes", "silent"],
)
def test_nvidia_smi_that_does_not_answer(body: str, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(nvidia_smi=body)
    if body == HANGS:
        monkeypatch.setattr(gpu, "PROBE_SECONDS", 1.0)
    found = nvidia.gather()
    assert found["tool"] and not found["answers"] and found["gpus"] == []
    facts = document.read(FACTS / "h200_x2_nvlink.json") | {"nvidia": found}
    faults = [f for f in checks.judge(facts) if f.level is Level.FAULT]
    assert (
        [f.about for f in faults] == ["driver"]
        and "nvidia-smi" in faults[0].found
        and "Xid" in faults[0].cure
    )


def test_no_tools_at_all(tools: Tools) -> None:
    assert nvidia.gather()["tool"] is False
    assert pci.gather() == {"error": "lspci is not installed"}
    facts = document.read(FACTS / "rtxpro6000_x8_switches.json") | {"pci": pci.gather()}
    (found,) = [f for f in checks.judge(facts) if f.about == "acs"]
    assert found.level is Level.NOTE and "lspci is not installed" in found.found


def test_lspci_of_another_form(tools: Tools) -> None:
    tools(lspci="echo '0000:01:00.0 3D controller: NVIDIA Corporation'; echo '  IOMMU group: none'")
    (device,) = pci.gather()["devices"]
    assert device["gpu"] and device["iommu_group"] is None
    tools(lspci="exit 1")
    assert pci.gather() == {"error": "lspci gave no answer"}


def test_sixteen_gpus_and_an_unknown_one(tools: Tools) -> None:
    rows = "\n".join(GOOD_ROW.format(16 + index) for index in range(16)).replace(
        "NVIDIA H200", "NVIDIA X9000"
    )
    title = "\t".join(["", *(f"GPU{index}" for index in range(16)), "CPU Affinity"])
    matrix = "\n".join(
        "\t".join(
            [
                f"GPU{i}",
                *("X" if i == j else "SYS" if (i < 8) != (j < 8) else "PIX" for j in range(16)),
                "0-63",
            ]
        )
        for i in range(16)
    )
    tools(
        nvidia_smi=f"""case "$*" in
*--query-gpu*) cat <<'END'
{rows.replace(" 9.0,", " 13.0,")}
END
;;
"topo -m") cat <<'END'
{title}
{matrix}
END
;;
*) exit 1;;
esac"""
    )
    found = nvidia.gather()
    assert len(found["gpus"]) == 16 and nvidia.farthest(found["paths"]) == "SYS"
    facts = document.read(FACTS / "rtxpro6000_x8_two_sockets.json") | {"nvidia": found}
    findings = checks.judge(facts)
    text = report.plain(findings, "gpu", 100, facts)
    assert "16 GPUs, the farthest two over" in text and max(map(len, text.splitlines())) <= 100
    assert "no row of its own in the table" in text


def test_mig_among_several(tools: Tools) -> None:
    facts = document.read(FACTS / "h200_x2_nvlink.json")
    facts["nvidia"]["gpus"][1]["mig"] = "Enabled"
    assert any("MIG" in f.found and f.cure for f in checks.judge(facts))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command on facts, with standard output to a pipe."""
    command = [sys.executable, "-m", "sglang.verify_doctor", "--from", str(FACTS / "h200_x1_vm.json")]
    return subprocess.run(
        [*command, *arguments], env=os.environ | environment, capture_output=True, timeout=600, check=False
    )


@pytest.mark.parametrize("form", ["--json", "--serving=gpu"])
def test_a_pipe_that_closes(form: str) -> None:
    """As with ``| head -1``: no traceback, and the status is the doctor's."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sglang.verify_doctor", "--from", str(FACTS / "t4_x1.json"), form]
    with os.fdopen(writing, "wb") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, timeout=600, check=False)
    assert done.stderr == b"" and done.returncode == 1


def test_a_terminal_without_the_characters(tmp_path: Path) -> None:
    """What a name of the facts holds is shown in another form rather than ending the report."""
    facts = document.read(FACTS / "h200_x1_vm.json")
    facts["nvidia"]["gpus"][0]["name"] = "NVIDIA H200 \u00b5\u4e2d"
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts), encoding="utf-8")
    done = run("--from", str(file), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert b"\\xb5\\u4e2d" in done.stdout


@pytest.mark.parametrize("name", MACHINES)
def test_exit_status_is_the_worst_finding(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = FACTS / f"{name}.json"
    expected = 1 if worst(checks.judge(document.read(file))) is Level.FAULT else 0
    assert main(["--from", str(file)]) == expected
    text = capsys.readouterr().out
    assert text.count("cure:") >= text.count("FAULT") + text.count("\nwarning")


@pytest.mark.parametrize(
    "state",
    [
        {"spec_stats": []},
        {"spec_stats": {"fork": 3}},
        {"spec_stats": {"cycles": "many"}},
        {"spec_stats": {"fallbacks": {"path": 3}, "ranks": [3]}},
        {"spec_stats": {"cycles": 3, "phase_ms": {"draft": None}}},
    ],
)
def test_a_server_of_another_form(state: dict[str, Any]) -> None:
    findings = server.judge({"states": [server._ours(state)]})
    assert findings and all(f.cure for f in findings if f.level in (Level.WARNING, Level.FAULT))
