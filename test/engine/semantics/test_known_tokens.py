"""A token id outside the vocabulary is the request's fault, not the server's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.speculative.semantics.limits_hooks import known_tokens

VOCABULARY = 11
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))


def request(*, images: bool = False) -> Any:
    """What the check reads of a request."""
    return SimpleNamespace(contains_mm_input=lambda: images)


def passes(*_: object) -> None:
    """Upstream's own checks, all met."""


@pytest.mark.parametrize("ids", [None, [0], [VOCABULARY - 1, 0, 3]])
def test_ids_of_the_model_pass(ids: list[int] | None) -> None:
    known_tokens(passes, MANAGER, request(), ids)


@pytest.mark.parametrize(("ids", "place"), [([VOCABULARY], 0), ([1, 2, -1], 2), ([1, 99999, -5], 1)])
def test_other_ids_are_refused_by_place_and_value(ids: list[int], place: int) -> None:
    with pytest.raises(ValueError, match=rf"input_ids\[{place}\] = {ids[place]} .* 0 to {VOCABULARY - 1}"):
        known_tokens(passes, MANAGER, request(), ids)


def test_no_token_at_all_is_refused() -> None:
    """Found by schemathesis: an empty list beside a text ended the scheduler."""
    with pytest.raises(ValueError, match="holds no token"):
        known_tokens(passes, MANAGER, request(), [])


def test_placeholders_of_images_are_left_alone() -> None:
    known_tokens(passes, MANAGER, request(images=True), [VOCABULARY + 7])


def test_upstreams_refusals_come_first() -> None:
    def refuses(*_: object) -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        known_tokens(refuses, MANAGER, request(), [VOCABULARY])


def test_the_patch_is_in_place_and_what_it_prevents() -> None:
    """Negative control: the method without its wrapper has no such check, and the lookup is an error."""
    method: Any = TokenizerManager._validate_one_request
    assert method.__wrapped__ is not method
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(torch.tensor([VOCABULARY]), torch.zeros(VOCABULARY, 2))
