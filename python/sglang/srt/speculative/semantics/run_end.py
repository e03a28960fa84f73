"""Where in a run of accepted tokens a request ends.

Plain decoding looks at a request after every token. A run of several tokens must be looked at in the same
way, or a stop inside the run loses against a length limit that a later token of the run reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LENGTH = "length"
OUT_OF_VOCABULARY = "out of vocabulary"
STOP_TEXT = "stop text"
STOP_TOKEN = "stop token"


@dataclass(frozen=True)
class EndRules:
    """What ends one request.

    Attributes:
        max_new_tokens: the request's own limit, already lowered to what the context leaves.
        vocab_size: ids outside ``[0, vocab_size)`` end the request.
        stop_tokens: ids that end it (stop ids and end-of-sequence ids); empty under ``ignore_eos``.
        text_ends: given the output ids up to and with the newest token, whether a stop text is complete;
            None when the request has no stop text, so that nothing is decoded.
    """

    max_new_tokens: int
    vocab_size: int
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    text_ends: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class RunEnd:
    """``kept`` tokens of the run belong to the output, the last of them included; ``reason`` names the rule."""

    kept: int
    reason: str


def find_run_end(output: Sequence[int], run: Sequence[int], rules: EndRules) -> RunEnd | None:
    """The first token of ``run`` after which plain decoding would have stopped, or None.

    The rules are tried in plain decoding's order at every token: length, vocabulary, text, token.

    Args:
        output: ids committed before this run (the prompt is not part of it).
        run: the accepted ids of this step, in order.
        rules: what ends the request.
    """
    for kept, token in enumerate(run, start=1):
        if len(output) + kept >= rules.max_new_tokens:
            return RunEnd(kept, LENGTH)
        if not 0 <= token < rules.vocab_size:
            return RunEnd(kept, OUT_OF_VOCABULARY)
        if rules.text_ends is not None and rules.text_ends([*output, *run[:kept]]):
            return RunEnd(kept, STOP_TEXT)
        if token in rules.stop_tokens:
            return RunEnd(kept, STOP_TOKEN)
    return None


def tail_decoder(
    decode: Callable[[Sequence[int]], str],
    matches: Sequence[Callable[[str], bool]],
    window: int,
) -> Callable[[Sequence[int]], bool] | None:
    """A ``text_ends`` that decodes only the last ``window`` ids; None when there is nothing to match.

    The window is what plain decoding looks at after one token (the longest stop text in tokens, plus one):
    a wider one could find a stop text that straddles more tokens than plain decoding would have decoded.
    """
    if not matches:
        return None

    def text_ends(ids: Sequence[int]) -> bool:
        text = decode(ids[-window:])
        return any(match(text) for match in matches)

    return text_ends
