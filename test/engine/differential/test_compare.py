"""What the comparison of answers lets pass, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from .compare import differences

REFUSED = {"type": "abort", "message": "too long", "status_code": 400}
ENDED = {"type": "length", "length": 1}
EMPTY: dict[str, Any] = {
    "input_token_logprobs": [],
    "output_token_logprobs": [],
    "output_token_logprobs_length": 0,
}


def answer(reason: dict[str, Any], ids: list[int], **meta: Any) -> dict[str, Any]:
    return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (answer(REFUSED, [0]), answer(REFUSED, [2], **EMPTY), True),
        (answer(REFUSED, [0]), answer({**REFUSED, "message": "too short"}, [0]), False),
        (answer(REFUSED, [0]), answer(REFUSED, [0], input_token_logprobs=[[-1.0, 7, None]]), False),
        (answer(ENDED, [0]), answer(ENDED, [0], **EMPTY), False),
        (answer(ENDED, [0]), answer(ENDED, [2]), False),
        (answer(ENDED, [0]), answer(ENDED, [0]), True),
    ],
)
def test_what_counts_as_equal(left: dict[str, Any], right: dict[str, Any], equal: bool) -> None:
    assert (not differences(left, right)) is equal
    assert (not differences(right, left)) is equal
