"""Values of a kind that the scheduler cannot do with are refused by name; each ended the server, with or without EAGLE-3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.semantics.limits_hooks import known_tokens
from sglang.srt.speculative.semantics.request_fields import fault, sampling_fault

VOCABULARY = 11


@pytest.mark.parametrize(
    "fields",
    [
        {"return_hidden_states": [True, False]},
        {"return_hidden_states": "first"},
        {"extra_key": ["a"]},
        {"extra_key": 7},
        {"bootstrap_room": [1]},
        {"bootstrap_room": True},
        {"bootstrap_host": ["a"]},
        {"lora_id": ["a"]},
        {"positional_embed_overrides": []},
        {"positional_embed_overrides": ["a", True]},
        {"positional_embed_overrides": 1e249},
        {"top_logprobs_num": VOCABULARY + 1},
        {"top_logprobs_num": 1 << 40},
        {"top_logprobs_num": -1},
        {"top_logprobs_num": [2]},
    ],
)
def test_fields_of_a_single_request_are_one_value(fields: dict[str, Any]) -> None:
    told = fault(SimpleNamespace(**fields), VOCABULARY)
    name, value = next(iter(fields.items()))
    assert told is not None and told.startswith(f"{name} = {value!r}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_hidden_states": "last"},
        {"return_hidden_states": True},
        {"extra_key": "a"},
        {"extra_key": None, "lora_id": None},
        {"bootstrap_room": 0},
        {"top_logprobs_num": 0},
        {"top_logprobs_num": VOCABULARY},
        {"positional_embed_overrides": SimpleNamespace(positions=[1])},
    ],
)
def test_single_values_pass(fields: dict[str, Any]) -> None:
    assert fault(SimpleNamespace(**fields), VOCABULARY) is None


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"max_new_tokens": 1.5}, "no whole number"),
        ({"max_new_tokens": "4"}, "no whole number"),
        ({"max_new_tokens": True}, "no whole number"),
        ({"min_new_tokens": 0.5}, "no whole number"),
        ({"sampling_seed": 1 << 63}, str(2**63 - 1)),
        ({"sampling_seed": "x"}, "no whole number"),
        ({"n": 1.5}, "no whole number"),
        ({"temperature": "1"}, "no number"),
        ({"top_p": [1]}, "no number"),
        ({"frequency_penalty": False}, "no number"),
        ({"regex": ["a"]}, "no text"),
        ({"json_schema": {"type": "object"}}, "no text"),
        ({"stop": 7}, "neither a text nor a list of texts"),
        ({"stop": [["a"]]}, "neither a text nor a list of texts"),
        ({"stop": [None]}, "neither a text nor a list of texts"),
        ({"stop_regex": 7}, "neither a text nor a list of texts"),
        ({"stop_regex": "("}, "no regular expression"),
        ({"stop_token_ids": 7}, "no list of token ids"),
        ({"stop_token_ids": [1.5]}, "no list of token ids"),
        ({"stop_token_ids": [1 << 70]}, "no list of token ids"),
        ({"logit_bias": []}, "no mapping"),
        ({"logit_bias": {"5": "y"}}, "no mapping"),
        ({"logit_bias": {"5": None}}, "no mapping"),
        ({"logit_bias": {"5": 1e39}}, "3.4e+38"),
        ({"logit_bias": {"5": float("nan")}}, "no mapping"),
    ],
)
def test_sampling_parameters_have_their_type(parameters: dict[str, Any], says: str) -> None:
    told = sampling_fault(parameters)
    name, value = next(iter(parameters.items()))
    assert told is not None and told.startswith(f"{name} = {value!r}") and says in told


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"max_new_tokens": 0, "min_new_tokens": 0, "n": 2, "sampling_seed": -1, "top_k": -1},
        {"max_new_tokens": None, "stop": None, "temperature": None, "logit_bias": None},
        {"temperature": 1, "top_p": 0.5, "stop": "a", "stop_token_ids": [1, None], "regex": ""},
        {"logit_bias": {"5": float("-inf"), "6": -3e38}},
        {"stop": ["a", "b"], "stop_regex": ["a+"], "logit_bias": {"5": 1, "6": -2.5}},
    ],
)
def test_right_parameters_pass(parameters: dict[str, Any]) -> None:
    assert sampling_fault(parameters) is None


def test_long_values_are_cut_in_the_message() -> None:
    told = sampling_fault({"regex": ["a" * 5000]})
    assert told is not None and len(told) < 200


def test_refused_before_upstreams_checks() -> None:
    """Upstream's own checks calculate with the values, and a text there is an error of the server (500)."""

    def upstream(*_: object) -> None:
        raise TypeError("unsupported operand")

    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    asked = SimpleNamespace(contains_mm_input=lambda: False, sampling_params={"max_new_tokens": "4"})
    with pytest.raises(ValueError, match="max_new_tokens = '4'"):
        known_tokens(upstream, manager, asked, [1])
