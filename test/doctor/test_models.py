"""A model on a machine: what it is, whether its draft fits, what memory is left."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang.verify_doctor.checks import judge
from sglang.verify_doctor.checks.models import cache_bytes, memory, pair
from sglang.verify_doctor.facts import document, models
from sglang.verify_doctor.findings import Finding, Level

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "models"
GIB = 1 << 30
LIMIT_S = 900

KIMI: dict[str, Any] = {
    "name": "k",
    "architecture": "KimiK25ForConditionalGeneration",
    "attention": "MLA",
    "dtype": "bfloat16",
    "quantization": "compressed-tensors",
    "context": 262144,
    "weight_bytes": 595 * GIB,
    "numbers": {
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "hidden_size": 7168,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
    },
}
LLAMA: dict[str, Any] = {
    "name": "l",
    "architecture": "LlamaForCausalLM",
    "attention": "GQA",
    "dtype": "bfloat16",
    "quantization": None,
    "context": 131072,
    "weight_bytes": 15 * GIB,
    "numbers": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
    },
}


def machine(name: str, target: dict[str, Any], draft: dict[str, Any] | None = None) -> document.Facts:
    """Facts of a machine with a model on it."""
    facts = copy.deepcopy(document.read(HERE / "facts" / f"{name}.json"))
    facts["models"] = {"target": target, "draft": draft, "fault": None, "remarks": [], "captures": []}
    return facts


def about(found: list[Finding], matter: str) -> Finding:
    """The one finding about a matter."""
    (finding,) = [f for f in found if f.about == matter]
    return finding


def test_cache_of_a_token() -> None:
    assert cache_bytes(KIMI, 8) == 61 * 576 * 2
    assert cache_bytes(LLAMA, 1) == 32 * 2 * 8 * 128 * 2
    assert cache_bytes(LLAMA, 8) == 32 * 2 * 1 * 128 * 2
    assert cache_bytes(LLAMA, 16) == cache_bytes(LLAMA, 8)
    assert cache_bytes({"attention": "GQA", "numbers": {}}, 1) is None


def test_plan_on_eight_gpus() -> None:
    """595 GiB over eight cards of 95 GiB leave 8.9 GiB each, at 68.6 KiB a token and 1 KiB for the draft."""
    draft = copy.deepcopy(LLAMA)
    draft["weight_bytes"] = 3 * GIB
    draft["numbers"] |= {"num_hidden_layers": 1}
    finding = about(memory(machine("rtxpro6000_x8_switches", KIMI, draft), "gpu"), "memory plan")
    assert finding.level is Level.OK
    assert "74.8 GiB of weights on each of 8 GPUs" in finding.found
    assert "69.1 KiB a token" in finding.found


def test_plan_that_cannot_be() -> None:
    finding = about(memory(machine("h200_x2_nvlink", KIMI), "gpu"), "memory plan")
    assert finding.level is Level.FAULT and "at least 5 such GPUs" in finding.cure
    finding = about(memory(machine("cpu_without_gpu", KIMI), "cpu"), "memory plan")
    assert finding.level is Level.FAULT


def test_description() -> None:
    text = about(pair(machine("h200_x2_nvlink", KIMI), "gpu"), "model").found
    assert text == (
        "k: KimiK25ForConditionalGeneration, MLA attention, 61 layers, 8 of 384 experts, compressed-tensors, "
        "595.00 GiB of weights, context 262,144"
    )


def test_shipped_pair() -> None:
    facts = models.gather(str(SHIPPED / "nano"), str(SHIPPED / "nano-eagle3"))
    assert facts["fault"] is None and facts["remarks"] == []
    assert facts["captures"] == [0, 2, 3]
    assert str(SHIPPED) not in json.dumps(facts)
    last = [f for f in pair({"models": facts}, "cpu") if f.about == "draft"][-1]
    assert last.found == "fits the target, reads the input of layers 0, 2, 3"


def test_draft_of_another_target(tmp_path: Path) -> None:
    config = json.loads((SHIPPED / "nano" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 256, "num_hidden_layers": 3}))
    facts = models.gather(str(tmp_path), str(SHIPPED / "nano-eagle3"))
    assert facts["fault"]["code"] == "width"
    (broken,) = [
        f for f in judge({"facts_version": 1, "models": facts}, "cpu") if "target_hidden_size" in f.found
    ]
    assert broken.level is Level.FAULT and broken.cure


@pytest.mark.parametrize("path", ["/no/such/model", "owner/name"])
def test_model_that_is_not_here(path: str) -> None:
    assert models.gather(path, None)["fault"] is not None


def test_command(tmp_path: Path) -> None:
    """This model on that machine, without torch; and the misuse of a draft alone."""
    base = [
        sys.executable,
        "-m",
        "sglang.verify_doctor",
        "--from",
        str(HERE / "facts" / "h200_x2_nvlink.json"),
    ]
    arguments = ["--model-path", str(SHIPPED / "nano"), "--draft-path", str(SHIPPED / "nano-eagle3")]
    done = subprocess.run([*base, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "fits the target" in done.stdout and "memory plan" in done.stdout
    done = subprocess.run(
        [*base, "--draft-path", "x"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2 and "--model-path" in done.stderr
