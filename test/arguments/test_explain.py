"""Whose fault a resolution that ended in an exception is: a description is blamed for what it can cause only."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.speculative.arguments import ArgumentFault
from sglang.srt.speculative.arguments.explain import explain

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("more", "error", "blamed"),
    [
        ({}, KeyError("x"), False),
        ({"num_attention_heads": 0}, KeyError("x"), True),
        ({"num_attention_heads": 0}, OSError("the hub does not answer"), False),
        ({"num_attention_heads": 0}, RuntimeError("no driver"), False),
        ({"num_key_value_heads": None}, KeyError("x"), False),
        ({"intermediate_size": [128, 256]}, KeyError("x"), False),
    ],
)
def test_blame(more: dict[str, Any], error: Exception, blamed: bool) -> None:
    def ask() -> None:
        explain(CONFIG | more, error, path="m", known=None, trust=False)

    if blamed:
        with pytest.raises(ArgumentFault, match="is unusable"):
            ask()
    else:
        ask()
