"""Topic ``run-chat-logprobs``: each token of a streamed chat answer has its own top log probabilities.

Upstream takes entry 0 of a piece for all tokens of the piece. In plain decoding a piece is one token unless the client is
slow; under speculation it is a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def each_tokens_own(
    original: Callable[..., list[Any]], serving: Any, logprobs: Any, use_token_index: bool = False
) -> list[Any]:
    """Around the entries of one piece of a chat answer: token ``i`` has top log probabilities ``i``.

    Upstream's streams pass only the piece's own tokens and yet take entry 0 for each.
    """
    return original(serving, logprobs, True)
