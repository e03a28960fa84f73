"""Ids of the auxiliary layers against the target's layer count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from checkpoints import DEEPSEEK, DRAFT, KIMI, LLAMA
from sglang.srt.speculative.arguments import ArgumentFault
from sglang.srt.speculative.arguments.aux_layers import check, count, default_positions

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
    Case(
        "own rule of a target, far outside",
        LLAMA | {"architectures": ["GptOssForCausalLM"]},
        [7],
        "aux-outside",
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
