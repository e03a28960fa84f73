"""Steps, top-k and draft tokens: every combination of given and missing, and every way to be out of range."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.speculative.arguments import ArgumentFault
from sglang.srt.speculative.arguments.flags import (
    DEFAULT_CHAIN_STEPS,
    MAX_DRAFT_TOKENS,
    STEPS,
    TOKENS,
    TOPK,
    Numbers,
    resolve,
    tree_capacity,
)


@dataclass(frozen=True)
class Good:
    """Numbers as given and as resolved, and which options were filled in."""

    name: str
    given: tuple[int | None, int | None, int | None]
    expected: tuple[int | None, int | None, int | None]
    filled: tuple[str, ...] = ()


GOOD = (
    Good("nothing stays nothing", (None, None, None), (None, None, None)),
    Good("sglang_22895 steps alone", (2, None, None), (2, 1, 3), (TOPK, TOKENS)),
    Good("sglang_22895 topk alone", (None, 1, None), (DEFAULT_CHAIN_STEPS, 1, 4), (STEPS, TOKENS)),
    Good("sglang_22895 tokens alone", (None, None, 3), (2, 1, 3), (STEPS, TOPK)),
    Good("steps and topk", (2, 1, None), (2, 1, 3), (TOKENS,)),
    Good("topk and tokens", (None, 1, 5), (4, 1, 5), (STEPS,)),
    Good("steps and tokens", (3, None, 4), (3, 1, 4), (TOPK,)),
    Good("all of a chain", (2, 1, 3), (2, 1, 3)),
    Good("shortest chain", (1, 1, 2), (1, 1, 2)),
    Good("a tree", (5, 8, 64), (5, 8, 64)),
    Good("a full tree of one level", (1, 4, 5), (1, 4, 5)),
    Good(
        "longest chain",
        (MAX_DRAFT_TOKENS - 1, None, None),
        (MAX_DRAFT_TOKENS - 1, 1, MAX_DRAFT_TOKENS),
        (TOPK, TOKENS),
    ),
)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_filled_in(case: Good) -> None:
    found = resolve("EAGLE3", Numbers(*case.given))
    assert found.numbers == Numbers(*case.expected)
    assert tuple(note.split()[0] for note in found.notes) == case.filled


@dataclass(frozen=True)
class Bad:
    """Numbers that are refused, the rule, and what the sentence has to name."""

    name: str
    given: tuple[Any, Any, Any]
    code: str
    names: tuple[str, ...]
    context_length: int | None = None


BAD = (
    Bad("steps zero", (0, 1, 3), "number-low", (f"{STEPS} 0", "at least 1")),
    Bad("sglang_22895 steps minus one", (-1, 1, 3), "number-low", (f"{STEPS} -1", "at least 1")),
    Bad("topk zero", (2, 0, 3), "number-low", (f"{TOPK} 0", "at least 1")),
    Bad("tokens one", (None, None, 1), "number-low", (f"{TOKENS} 1", "at least 2")),
    Bad("tokens minus two", (2, 1, -2), "number-low", (f"{TOKENS} -2", "at least 2")),
    Bad("steps huge", (10**9, 1, None), "number-high", (f"{STEPS} 1000000000", "at most 1023")),
    Bad("topk huge", (2, 5000, 3), "number-high", (f"{TOPK} 5000", "at most 1023")),
    Bad("tokens huge", (None, None, 1025), "number-high", (f"{TOKENS} 1025", "at most 1024")),
    Bad("tokens over the context", (None, None, 64), "number-high", (f"{TOKENS} 64", "at most 63", "64"), 64),
    Bad("steps not whole", (2.5, 1, 3), "number-type", (f"{STEPS} 2.5", "whole number")),
    Bad("steps a text", ("2", 1, 3), "number-type", (f"{STEPS} '2'", "whole number")),
    Bad("steps a truth value", (True, 1, 2), "number-type", (f"{STEPS} True", "whole number")),
    Bad(
        "sglang_8228 chain of 2 verifies 3",
        (2, 1, 2),
        "chain-width",
        (f"{TOKENS} 2", f"{STEPS} 2", f"{TOKENS} 3"),
    ),
    Bad("chain with eight tokens", (2, 1, 8), "chain-width", (f"{TOKENS} 8", f"{TOKENS} 3", f"{STEPS} 7")),
    Bad(
        "steps against tokens",
        (2, None, 8),
        "chain-width",
        (f"{TOKENS} 8", f"{TOKENS} 3", f"{TOPK} 2 or more"),
    ),
    Bad("tree alone", (None, 4, None), "tree-open", (f"{TOPK} 4", STEPS, TOKENS)),
    Bad("tree without tokens", (3, 4, None), "tree-open", (f"{TOPK} 4", TOKENS)),
    Bad("tree without steps", (None, 4, 8), "tree-open", (f"{TOPK} 4", STEPS)),
    Bad("tree too wide", (2, 2, 8), "tree-width", (f"{TOKENS} 8", "7 tokens")),
)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_refused(case: Bad) -> None:
    with pytest.raises(ArgumentFault) as caught:
        resolve("EAGLE3", Numbers(*case.given), context_length=case.context_length)
    fault = caught.value
    assert fault.code == case.code
    assert all(name in str(fault) for name in case.names), str(fault)
    assert "\n" not in str(fault) and str(fault).endswith(".")
    assert fault.remedy and fault.limit and fault.value


def test_another_algorithm_keeps_its_own_rules() -> None:
    given = Numbers(None, None, 8)
    assert resolve("NGRAM", given).numbers == given
    assert resolve(None, Numbers(-1, -1, -1)).numbers == Numbers(-1, -1, -1)


def test_adaptive_numbers_come_from_its_configuration() -> None:
    assert resolve("EAGLE3", Numbers(0, None, None), adaptive=True).numbers == Numbers(0, None, None)


_number = st.one_of(st.none(), st.integers(-2, 1100))


@settings(max_examples=300, deadline=None)
@given(_number, _number, _number)
def test_result_is_complete_and_stable(steps: int | None, topk: int | None, tokens: int | None) -> None:
    """Whatever is accepted is complete, fits together, keeps what was given, and resolves to itself."""
    asked = Numbers(steps, topk, tokens)
    try:
        found = resolve("EAGLE3", asked).numbers
    except ArgumentFault:
        return
    if asked == Numbers():
        assert found == asked
        return
    assert found.steps and found.topk and found.tokens
    assert all(
        value in (None, result)
        for value, result in itertools.zip_longest(vars(asked).values(), vars(found).values())
    )
    assert found.tokens <= tree_capacity(found.steps, found.topk)
    assert found.topk > 1 or found.tokens == found.steps + 1
    again = resolve("EAGLE3", found)
    assert again.numbers == found and not again.notes


def test_fault_survives_pickling() -> None:
    """Faults may cross a process border."""
    fault = ArgumentFault("a 1", "must be 2", "give 2", code="x")
    copy = pickle.loads(pickle.dumps(fault))
    assert (str(copy), copy.code, copy.value) == (str(fault), "x", "a 1")
