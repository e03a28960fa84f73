"""By the doctor's memory plan, every recipe leaves room for a request of its whole context on the machine it is for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_machines import BY_SUFFIX
from hub_models import HUB
from sglang.verify_doctor.deployment import child
from sglang.verify_doctor.deployment.machine import Machine

ROOT = Path(__file__).parents[2]
MODELS = ("model-path", "speculative-draft-model-path")
MULTIPROCESSORS = {(12, 0): 188, (9, 0): 132, (10, 0): 148}
# Recipes whose target is a public checkpoint: the shipped model fits anywhere.
CASES = [
    pytest.param(path, machine, id=f"{path.stem} on {machine.name}")
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
    for machine in BY_SUFFIX.get(path.stem.rpartition(".")[2], ())
    if not path.stem.startswith("nano")
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test asks a hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield


def plan(path: Path, name: str, folder: Path, *more: str) -> dict[str, Any]:
    """The doctor's answer for a recipe; checkpoints are configurations alone, so weights are counted from them."""
    asked = yaml.safe_load(path.read_text(encoding="utf-8"))
    argv = ["--config", str(path), "--load-format", "dummy"]
    for option in MODELS:
        if option in asked:
            place = folder / asked[option].replace("/", "--")
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(json.dumps(HUB[asked[option]]), encoding="utf-8")
            argv += [f"--{option}", str(place)]
    (seen,) = [m for m in BY_SUFFIX[path.stem.rpartition(".")[2]] if m.name == name]
    machine = Machine(
        name, seen.capability, seen.memory_mib, seen.gpus, MULTIPROCESSORS[seen.capability], 0, "13.0"
    ).as_dict()
    request = {"argv": [*argv, *more], "machine": machine, "gpu": machine, "facts": {}}
    return child.answer(json.loads(json.dumps(request)))


@pytest.mark.parametrize(("path", "machine"), CASES)
def test_one_request_fits(path: Path, machine: Any, tmp_path: Path) -> None:
    found = plan(path, machine.name, tmp_path)
    assert found["fault"] is None
    memory = found["memory"]
    assert memory["weights_known"] and memory["overrun_bytes"] == 0
    assert memory["tokens"] >= memory["context"], memory
    # Activations of a prefill chunk, graphs and buffers have to live in the rest; this is less than upstream asks for.
    assert memory["set_aside_bytes"] >= 6 << 30


def test_the_servers_own_choice_does_not_do_for_kimi_on_96_gb(tmp_path: Path) -> None:
    """Negative control: without the fraction that the recipe states."""
    path = ROOT / "recipes" / "kimi-k2.5-mla.8x-rtx-pro-6000.yaml"
    asked = yaml.safe_load(path.read_text(encoding="utf-8"))
    del asked["mem-fraction-static"]
    bare = tmp_path / path.name
    bare.write_text(yaml.safe_dump(asked), encoding="utf-8")
    memory = plan(bare, BY_SUFFIX["8x-rtx-pro-6000"][0].name, tmp_path)["memory"]
    assert memory["overrun_bytes"] > 0


def test_a_draft_inside_its_target_is_one_layer(tmp_path: Path) -> None:
    """The MTP layer of DeepSeek is not counted as a second target, neither in weights nor in cache."""
    path = ROOT / "recipes" / "deepseek-r1.8x-h200.yaml"
    memory = plan(path, BY_SUFFIX["8x-h200"][0].name, tmp_path)["memory"]
    target, draft = (memory["parts"][f"weights, {name}"] for name in ("target", "draft"))
    assert 0.01 * target < draft < 0.05 * target
    # 61 layers and one, 576 values of two bytes each.
    assert memory["token_bytes"] == 62 * 576 * 2
