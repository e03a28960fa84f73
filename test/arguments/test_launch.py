"""The three ways to start a server, for real: one line, status 2, no traceback, no process left, no weights read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import DRAFT, LLAMA, draft_tensors, write, write_safetensors

pytestmark = pytest.mark.server

LIMIT_S = 600
CHAIN = [
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "3",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose weights cannot be loaded: a start that got so far would say so."""
    place = tmp_path_factory.mktemp("models")
    write(place / "target", LLAMA, {"model.norm.weight": ("BF16", (32,), None)})
    write(place / "draft", DRAFT, draft_tensors(DRAFT))
    write(place / "wide", DRAFT | {"hidden_size": 64}, draft_tensors(DRAFT | {"hidden_size": 64}))
    write(place / "huge", LLAMA)
    # A hole of 8 TiB: no file system block is written, and no machine could hold it.
    write_safetensors(place / "huge" / "model.safetensors", {"model.norm.weight": ("BF16", (1 << 42,), None)})
    return place


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, within a bound."""
    settings = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def check_refusal(result: subprocess.CompletedProcess[str], says: tuple[str, ...]) -> None:
    """One line that says it, status 2, and nothing of a start."""
    output = result.stdout + result.stderr
    assert result.returncode == 2, output
    lines = [line for line in result.stderr.splitlines() if line.startswith("sglang: error: ")]
    assert len(lines) == 1, output
    assert all(text in lines[0] for text in says), lines[0]
    assert "Traceback" not in output
    assert "Load weight" not in output and "Init torch distributed" not in output


@dataclass(frozen=True)
class Case:
    """Arguments that are refused; ``{m}`` is the directory of the models, ``{port}`` a taken port."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]


E3 = ("--speculative-algorithm", "EAGLE3")
D = ("--speculative-draft-model-path", "{m}/draft")
CASES = (
    Case(
        "steps 0",
        ("--model-path", "{m}/target", *E3, *D, "--speculative-num-steps", "0"),
        ("--speculative-num-steps 0", "at least 1"),
    ),
    Case(
        "sglang_36528",
        ("--model-path", "{m}/target", *E3, *CHAIN),
        ("--speculative-draft-model-path", "no built-in head"),
    ),
    Case(
        "draft missing",
        ("--model-path", "{m}/target", *E3, D[0], "{m}/none", *CHAIN),
        ("{m}/none", "no directory"),
    ),
    Case(
        "draft of another width",
        ("--model-path", "{m}/target", *E3, D[0], "{m}/wide", *CHAIN),
        ("hidden_size 64", "32"),
    ),
    Case(
        "model path wrong",
        (
            "--model-path",
            "{m}/targett",
        ),
        ("{m}/targett", "no directory"),
    ),
    Case(
        "port taken",
        ("--model-path", "{m}/target", *E3, *D, *CHAIN, "--port", "{port}"),
        ("--port {port}", "listens"),
    ),
    Case("too large", ("--model-path", "{m}/huge"), ("8192.00 GiB", "this machine")),
)


# A start costs ten seconds. The rules themselves are tested on ServerArgs; one of each origin is started here.
QUICK = ("sglang_36528", "port taken", "too large")
PARAMETERS = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_launch_server(case: Case, models: Path, taken: int) -> None:
    def fill(text: str) -> str:
        return text.format(m=models, port=taken)

    arguments = [fill(text) for text in case.arguments]
    result = run(["-m", "sglang.launch_server", "--device", "cpu", *arguments])
    check_refusal(result, tuple(fill(text) for text in case.says))


def test_sglang_serve(models: Path) -> None:
    arguments = ["--device", "cpu", "--model-path", str(models / "target"), *E3, *CHAIN]
    result = run(
        ["-c", "import sys; from sglang.cli.main import main; sys.exit(main())", "serve", *arguments]
    )
    check_refusal(result, ("--speculative-draft-model-path",))


def test_engine(models: Path) -> None:
    program = (
        "import sglang\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        f"        sglang.Engine(model_path={str(models / 'target')!r}, device='cpu', speculative_algorithm='EAGLE3')\n"
        "    except ValueError as error:\n"
        "        print('ValueError:', error)\n"
    )
    result = run(["-c", program])
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("ValueError: ")]
    assert "without --speculative-draft-model-path" in line


def test_topic_off(models: Path) -> None:
    """Negative control: upstream alone ends in a traceback that does not name the options."""
    arguments = ["--model-path", str(models / "target"), *E3, "--speculative-num-steps", "2"]
    arguments += ["--speculative-draft-model-path", str(models / "draft")]
    result = run(
        ["-m", "sglang.launch_server", "--device", "cpu", *arguments], SGLANG_FORK_DISABLE="spec-arguments"
    )
    assert result.returncode == 1
    assert "TypeError" in result.stderr and "Traceback" in result.stderr
