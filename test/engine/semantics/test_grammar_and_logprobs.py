"""Grammar masks on a CPU (E15) and log probabilities in mixed batches (E12)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained import xgrammar_backend
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.layers import logprob_processor
from sglang.srt.speculative.semantics import grammar_hooks


def words(allowed: list[int], columns: int) -> list[int]:
    """A bitmask as signed 32-bit words, built bit by bit."""
    out = []
    for start in range(0, columns, 32):
        word = sum(1 << (token - start) for token in allowed if start <= token < start + 32)
        out.append(word - (1 << 32) if word >= 1 << 31 else word)
    return out


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 97, 320])
def test_mask_bit_by_bit(columns: int) -> None:
    allowed = [token for token in range(columns) if token % 3 == 0 or token % 32 == 31]
    mask = torch.tensor([words(allowed, columns), [-1] * -(-columns // 32)], dtype=torch.int32)
    logits = torch.randn(2, columns)
    untouched = logits.clone()
    grammar_hooks.mask_logits(logits, mask)
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == allowed
    assert torch.equal(logits[0, allowed], untouched[0, allowed])
    assert torch.equal(logits[1], untouched[1])


def test_columns_beyond_the_mask_are_forbidden() -> None:
    logits = torch.zeros(1, 40)
    grammar_hooks.mask_logits(logits, torch.tensor([[-1]], dtype=torch.int32))
    assert torch.isfinite(logits).sum() == 32


def test_allocation_without_a_driver() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    mask = xgrammar_backend._allocate_token_bitmask(97, 5)
    assert mask.shape == (5, 4) and mask.dtype == torch.int32 and bool((mask == -1).all())
    with pytest.raises(RuntimeError):
        xgrammar_backend._allocate_token_bitmask.__wrapped__(97, 5)


def test_chosen_tokens_of_a_mixed_batch() -> None:
    logprobs = torch.randn(3, 11).log_softmax(-1)
    values, indices = logprob_processor.get_token_ids_logprobs(
        logprobs, [[3, 4], None, [5]], no_copy_to_cpu=True
    )
    assert [value.tolist() for value in values] == [
        logprobs[0, [3, 4]].tolist(),
        [],
        logprobs[2, [5]].tolist(),
    ]
    assert indices == [[3, 4], [], [5]]
    stock, _ = logprob_processor.get_token_ids_logprobs.__wrapped__(logprobs, [[3, 4], None], True)
    assert not torch.is_tensor(stock[1]), "negative control: upstream hands a list to code that calls tolist"


def test_each_token_of_a_streamed_piece_has_its_own_top_logprobs() -> None:
    """A piece of three tokens, as a run makes it; upstream repeats the first one's."""
    piece = SimpleNamespace(
        tokens=["a", "b", "c"],
        token_logprobs=[-0.1, -0.2, -0.3],
        top_logprobs=[{"a": -0.1}, {"b": -0.2}, {"c": -0.3}],
    )
    method: Any = OpenAIServingChat._process_logprobs_tokens

    def tops(entries: list[Any]) -> list[str]:
        return [entry.top_logprobs[0].token for entry in entries]

    assert tops(method(None, piece, use_token_index=False)) == ["a", "b", "c"]
    assert tops(method.__wrapped__(None, piece, use_token_index=False)) == ["a", "a", "a"], "negative control"
