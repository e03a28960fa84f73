"""A deployment that the server could not start: a fault with its cure and status 1, whatever is in the way.

What the server resolves and only the doctor cannot describe is a warning: the server starts all the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sglang.verify_doctor import checks, deployment
from sglang.verify_doctor.__main__ import main
from sglang.verify_doctor.deployment import child, memory
from sglang.verify_doctor.facts import document
from sglang.verify_doctor.findings import Finding, Level

MACHINE = Path(__file__).parent / "facts" / "h200_x2_nvlink.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    """A change of a good ``config.json`` or of the flags, and what the fault has to say."""

    name: str
    says: str
    config: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    raw: bytes | None = None


CASES = (
    Case("no architectures", "names no architectures", {"architectures": None}),
    Case("architectures in a text", "names no architectures", {"architectures": "LlamaForCausalLM"}),
    Case("unknown type", "model_type llamma", {"model_type": "llamma"}),
    Case("width in words", "hidden_size 'big'", {"hidden_size": "big"}),
    Case("no heads", "num_attention_heads 0", {"num_attention_heads": 0}),
    Case("unknown dtype", "names dtype float7", {"torch_dtype": "float7"}),
    Case("unknown quantisation", "nosuch", {"quantization_config": {"quant_method": "nosuch"}}),
    Case("half a rope", "factor", {"rope_scaling": {"type": "yarn"}}),
    Case("not JSON", "is not JSON", raw=b"{"),
    Case("a list", "is a JSON list", raw=b"[1]"),
    Case("no text", "cannot be read", raw=b"\xff\xfe\x00"),
    Case("too deep", "is not JSON", raw=b'{"a": ' + b"[" * 100_000),
    Case("unknown flag", "--no-such-flag", flags=("--no-such-flag",)),
    Case("no ranks", "--tp-size 0 must be at least 1", flags=("--tp", "0")),
    Case("fewer than no ranks", "--tp-size -1 must be at least 1", flags=("--tp", "-1")),
    Case("more ranks than GPUs", "only 2 are visible", flags=("--tp", "3")),
    Case("no context", "--context-length -5 must be", flags=("--context-length", "-5")),
    Case("no requests", "--max-running-requests 0 must be", flags=("--max-running-requests", "0")),
    Case("all the memory twice", "--mem-fraction-static 2 must be", flags=("--mem-fraction-static", "2")),
    Case("a GPU below the first", "base_gpu_id", flags=("--base-gpu-id", "-1")),
    Case("what the engine refuses", "chunked prefill", flags=("--enable-pdmux",)),
    Case("overlap alone", "--enable-dp-attention is required", flags=("--enable-two-batch-overlap",)),
    Case(
        "no such profile", "--nccl-profile pcie-swich is no profile", flags=("--nccl-profile", "pcie-swich")
    ),
    Case("a file that is none", "must end in .yaml", flags=("--config", "x")),
    Case("a file in one word", "would be ignored", flags=("--config=x.yaml",)),
)


def judged(model: Path, flags: tuple[str, ...] = ()) -> list[Finding]:
    """Findings about a deployment on two H200s; resolved in this process, as every child would import the server."""
    facts = document.read(MACHINE)
    argv = [*flags, "--model-path", str(model), "--load-format", "dummy"]
    asked = json.loads(json.dumps(deployment.request(argv, facts, here=False, mode="gpu")))
    facts["deployment"] = {"argv": argv} | child.answer(asked)
    return checks.judge(facts, "gpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def test_control_the_unchanged_one(model: Path) -> None:
    assert not [f for f in judged(model) if f.level is Level.FAULT]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_cannot_start_is_a_fault(case: Case, model: Path) -> None:
    content = {name: value for name, value in (CONFIG | case.config).items() if value is not None}
    (model / "config.json").write_bytes(case.raw or json.dumps(content).encode())
    (found,) = [f for f in judged(model, case.flags) if f.level is Level.FAULT]
    assert found.about == "deployment" and case.says in found.found, found
    assert found.cure and "\n" not in found.found and len(found.found) < 700


def test_a_resolution_that_fails_is_status_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command as it is given: nothing of upstream's traceback, its last line and what to do."""
    content = CONFIG | {"rope_scaling": {"type": "yarn"}}
    (model / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["--from", str(MACHINE), "--model-path", str(model), "--load-format", "dummy"]) == 1
    captured = capsys.readouterr()
    assert (
        "cannot be resolved: KeyError" in captured.out
        and "cure: run the doctor on the machine itself" in captured.out
    )
    assert "Traceback" not in captured.out + captured.err


def test_what_only_the_doctor_cannot_describe(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise LookupError("a shape of another kind")

    monkeypatch.setattr(memory, "plan", broken)
    (found,) = [f for f in judged(model) if f.group == "deployment" and f.level is not Level.NOTE]
    assert found.level is Level.WARNING and "a shape of another kind" in found.found and found.cure


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"error": "no answer within 240 s"}, "memory and disk"),
        ({"error": "the process was killed by signal 9"}, "memory and disk"),
        ({"error": "ModuleNotFoundError: No module named 'torch' (...)"}, "install what is missing"),
        ({"error": "RuntimeError: x"}, "without --from"),
    ],
)
def test_a_child_without_an_answer(
    answer: dict[str, str], says: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked whether it would start, "not known" is no yes."""
    monkeypatch.setattr(deployment.children, "run", lambda *_, **__: answer)
    facts = document.read(MACHINE)
    facts["deployment"] = deployment.gather(["--model-path", str(model)], facts, here=False, mode="gpu")
    (found,) = [f for f in checks.judge(facts) if f.level is Level.FAULT]
    assert answer["error"] in found.found and says in found.cure


def test_facts_of_an_older_doctor() -> None:
    """Their error came without a cure."""
    (found,) = [
        f
        for f in checks.judge(document.read(MACHINE) | {"deployment": {"error": "x"}})
        if f.level is Level.FAULT
    ]
    assert found.cure
