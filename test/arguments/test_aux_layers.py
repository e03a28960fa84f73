"""Ids of the auxiliary layers against the target's layer count."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
from checkpoints import DEEPSEEK, DRAFT, KIMI, LLAMA
from sglang.srt import server_args as upstream
from sglang.srt.speculative.arguments import ArgumentFault
from sglang.srt.speculative.arguments.aux_layers import (
    ALWAYS_SHIFT,
    SHIFT_IF_ONE,
    check,
    count,
    default_positions,
    shift,
)
from sglang.srt.speculative.arguments.target import METHOD

_UNSET = object()
KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Case:
    """Ids of a draft for a target; ``code`` None means accepted."""

    name: str
    target: dict[str, Any]
    ids: Any
    code: str | None = None
    says: tuple[str, ...] = ()


def _layers(target: dict[str, Any], number: int) -> dict[str, Any]:
    return target | {"num_hidden_layers": number}


GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"]}
CASES = (
    Case("vllm_46788 inputs of Kimi layers", KIMI, [2, 30, 58]),
    Case("vllm_46788 outputs, shifted by one", KIMI, [1, 29, 57]),
    Case("vllm_46788 last layer (P5)", KIMI, [2, 30, 61], "aux-outside", ("between 0 and 60", "61 layers")),
    Case(
        "vllm_46788 shifted onto the last layer", DEEPSEEK, [1, 29, 60], "aux-outside", ("between 0 and 59",)
    ),
    Case("vllm_46788 no ids", KIMI, [], "aux-form", ("non-empty",)),
    Case("vllm_46788 far outside", KIMI, [2, 30, 99], "aux-outside", ("99", "60")),
    Case("sglang_32334 Llama shifts always", _layers(LLAMA, 32), [2, 16, 30]),
    Case(
        "sglang_32334 Llama last output",
        _layers(LLAMA, 32),
        [2, 16, 31],
        "aux-outside",
        ("between 0 and 30",),
    ),
    Case("a layer twice", DEEPSEEK, [2, 30, 30], "aux-twice", ("2 hidden states, not 3",)),
    Case("counted from the end", DEEPSEEK, [2, 30, -1], "aux-outside", ("-1",)),
    Case("no number", DEEPSEEK, [2, "30", 58], "aux-form"),
    Case("a truth value", DEEPSEEK, [True, 30, 58], "aux-form"),
    Case("no list", DEEPSEEK, 30, "aux-form"),
    Case("embeddings and the last input", DEEPSEEK, [0, 30, 60]),
    Case("default of a deep model", DEEPSEEK, _UNSET),
    Case(
        "default repeats with six layers", _layers(LLAMA, 6), _UNSET, "aux-default", ("[2, 3, 3]", "6 layers")
    ),
    Case("default leaves two layers", _layers(LLAMA, 2), _UNSET, "aux-default", ("[2, 1, -1]",)),
    Case("boundary behind the last layer, where a target has it", GPT_OSS, [2, 3, 7]),
    Case("outside under any rule", GPT_OSS, [2, 3, 8], "aux-outside", ("between 0 and 7",)),
    Case(
        "a family derived from DeepSeek",
        DEEPSEEK | {"architectures": ["MistralLarge3ForCausalLM"]},
        [2, 30, 60],
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ids(case: Case) -> None:
    section = {} if case.ids is _UNSET else {KEY: case.ids}
    draft = DRAFT | {"eagle_config": section}
    if case.code is None:
        assert check(case.target, draft, draft_path="d") == []
        return
    with pytest.raises(ArgumentFault) as caught:
        check(case.target, draft, draft_path="d")
    assert caught.value.code == case.code
    assert all(text in str(caught.value) for text in case.says), str(caught.value)


def test_number_of_ids_against_stated_number() -> None:
    draft = DRAFT | {"num_aux_hidden_states": 3, "eagle_config": {KEY: [2, 30]}}
    with pytest.raises(ArgumentFault, match="are 2, but the draft's num_aux_hidden_states is 3"):
        check(DEEPSEEK, draft, draft_path="d")


def test_ids_outside_eagle_config_would_be_ignored() -> None:
    """The server reads the ids from ``eagle_config`` only; elsewhere the default is captured in their place."""
    draft = {key: value for key, value in DRAFT.items() if key != "eagle_config"}
    with pytest.raises(ArgumentFault, match="where the server does not look"):
        check(DEEPSEEK, draft | {KEY: [2, 20, 40]}, draft_path="d")
    assert check(DEEPSEEK, draft | {KEY: default_positions(61)}, draft_path="d") == []


def test_descending_ids_are_remarked() -> None:
    (remark,) = check(DEEPSEEK, DRAFT | {"eagle_config": {KEY: [58, 30, 2]}}, draft_path="d")
    assert "layer order" in remark


def test_a_draft_without_aux_states_needs_no_ids() -> None:
    draft = DRAFT | {"eagle_config": {"use_aux_hidden_state": False, KEY: [99]}}
    assert check(DEEPSEEK, draft, draft_path="d") == []


def test_count() -> None:
    assert count(DRAFT) == 3
    assert count(DRAFT | {"num_aux_hidden_states": 5}) == 5
    assert count(DRAFT | {"eagle_config": {KEY: [1, 2]}}) == 2
    assert count({}) == 3


LAST_RANK = SimpleNamespace(is_last_rank=True)
MODELS = Path(upstream.__file__).parent / "models"


def setter(name: str) -> Callable[[Any, list[int]], None]:
    """Upstream's own method of a class, compiled alone: importing the model files would load every kernel."""
    (file,) = [f for f in MODELS.glob("*.py") if f"\nclass {name}(" in f.read_text(encoding="utf-8")]
    classes = {
        node.name: node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    node = classes[name]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == METHOD:
            scope: dict[str, Any] = {"Optional": Optional, "List": list, "get_pp_group": lambda: LAST_RANK}
            exec(compile(ast.Module([item], []), str(file), "exec"), scope)
            return scope[METHOD]  # type: ignore[no-any-return]
    return setter(ast.unparse(node.bases[0]))


class Target:
    """Stands in for a loaded model: keeps the capture positions wherever the class puts them."""

    def __init__(self, layers: int) -> None:
        self.pp_group = LAST_RANK
        self.config = SimpleNamespace(num_hidden_layers=layers)
        self.model = self
        self.layers_to_capture: list[int] = []

    def set_eagle3_layers_to_capture(self, positions: list[int]) -> None:
        self.layers_to_capture = positions


@pytest.mark.parametrize("ids", [[2, 4, 6], [1, 3, 5], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("name", sorted((SHIFT_IF_ONE | ALWAYS_SHIFT) - {"KimiK25ForConditionalGeneration"}))
def test_the_rules_are_the_servers(name: str, ids: list[int]) -> None:
    """What upstream's model classes make of ids, run for real, against what the check takes them to make."""
    target = Target(12)
    setter(name)(target, list(ids))
    added = shift({"architectures": [name]}, ids)
    assert added is not None
    assert target.layers_to_capture == [i + added for i in ids]
