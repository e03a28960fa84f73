"""The command itself: here, on facts of other machines, and where nothing is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 600


def run(
    *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the doctor to its end."""
    return subprocess.run(
        [python, "-m", "sglang.verify_doctor", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_this_machine_and_back(tmp_path: Path) -> None:
    """What ``--json`` writes, ``--from`` reads, with the same findings."""
    first = run("--json")
    content = json.loads(first.stdout)
    assert first.returncode == (1 if content["status"] == "fault" else 0), first.stderr
    broken = {
        name for name, value in content["facts"].items() if isinstance(value, dict) and "error" in value
    }
    # The tool that lists PCI devices is not everywhere.
    assert broken <= {"pci"}
    file = tmp_path / "facts.json"
    file.write_text(first.stdout)
    second = run("--json", "--from", str(file))
    assert json.loads(second.stdout) == content


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("h200_x2_nvlink", 0, "ready for gpu serving"),
        ("rtxpro6000_x8_iommu_translation", 1, "gpu serving will fail: 2 faults"),
        ("cpu_without_gpu", 0, "ready for cpu serving"),
    ],
)
def test_recorded_facts(name: str, status: int, says: str) -> None:
    result = run("--from", str(HERE / "facts" / f"{name}.json"))
    assert result.returncode == status, result.stderr
    assert says in result.stdout
    assert result.stdout.count("cure:") >= result.stdout.count("FAULT")


def test_sglang_4778_without_any_package(tmp_path: Path) -> None:
    """An interpreter that has neither torch nor anything else: faults with cures, no traceback."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    home = importlib.util.find_spec("sglang")
    assert home is not None and home.origin is not None
    # The tree as a path: an installed or linked package belongs to the interpreter that the test runs on.
    tree = str(Path(home.origin).parents[1])
    result = run(python=str(tmp_path / "bare" / "bin" / "python"), PYTHONPATH=tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert (
        "torch" in result.stdout and "not installed" in result.stdout and "cure: pip install" in result.stdout
    )


def test_sglang_29317_other_torch(tmp_path: Path) -> None:
    """A later torch installed over the pinned one: the pair is named."""
    information = tmp_path / "torch-2.12.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    result = run(PYTHONPATH=path)
    assert result.returncode == 1
    assert "torch 2.12.0 with sglang" in result.stdout and "torch==2.11.0" in result.stdout


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"facts_version": 99}'])
def test_unusable_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text)
    result = run("--from", str(file))
    assert result.returncode == 2
    assert result.stderr.startswith("verify_doctor: error: ") and "Traceback" not in result.stderr


def test_missing_file() -> None:
    assert run("--from", "/no/such/file").returncode == 2
