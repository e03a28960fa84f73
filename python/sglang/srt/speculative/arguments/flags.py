"""The three numbers of a draft (steps, top-k, draft tokens): ranges, contradictions, the one sane filling.

A chain (top-k 1) of ``s`` steps proposes ``s`` tokens and verifies ``s + 1``, so any one of the numbers
gives the others. A tree (top-k above 1) leaves a real choice, so there all three have to be given.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.speculative.arguments.faults import ArgumentFault

STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
TOKENS = "--speculative-num-draft-tokens"

EAGLE_FAMILY = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})

# The tree kernels start one GPU thread per draft token in a single block, and 1024 is the most a block holds.
MAX_DRAFT_TOKENS = 1024
# What upstream itself takes for a chain when no number is given.
DEFAULT_CHAIN_STEPS = 3

# Numbers of the whole server of which less than one is no server, with a usual value; upstream divides by some.
COUNTS = (
    ("--tp-size", "tp_size", "1"),
    ("--pp-size", "pp_size", "1"),
    ("--dp-size", "dp_size", "1"),
    ("--context-length", "context_length", "8192"),
    ("--max-running-requests", "max_running_requests", "8"),
    ("--max-total-tokens", "max_total_tokens", "65536"),
)
FRACTION = "--mem-fraction-static"


@dataclass(frozen=True)
class Numbers:
    """Steps, top-k and draft tokens as given; None is "not given"."""

    steps: int | None = None
    topk: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Resolution:
    """The numbers to use, and one sentence for each that was filled in."""

    numbers: Numbers
    notes: tuple[str, ...] = field(default=())


def resolve(
    algorithm: str | None, given: Numbers, *, adaptive: bool = False, context_length: int | None = None
) -> Resolution:
    """Check the numbers and fill in those that follow from the others.

    Nothing given stays nothing given: upstream then chooses by architecture. With ``adaptive`` the numbers
    come from the adaptive configuration and only their ranges are checked.

    Raises:
        ArgumentFault: a number out of range, or numbers that contradict each other or leave a choice open.
    """
    if algorithm is None:
        return Resolution(given)
    _check_ranges(given, lowest_steps=0 if adaptive else 1, context_length=context_length)
    if adaptive or algorithm.upper() not in EAGLE_FAMILY or given == Numbers():
        return Resolution(given)
    if given.topk is not None and given.topk > 1:
        return _tree(given, given.topk)
    return _chain(given)


def check_server_numbers(args: Any) -> None:
    """Refuse counts below one and a share of the memory that is none, before upstream reckons with them.

    Raises:
        ArgumentFault: ``number-low`` or ``number-high``; None, which leaves the choice to upstream, passes.
    """
    for option, attribute, example in COUNTS:
        value = getattr(args, attribute, None)
        if value is not None and value < 1:
            remedy = f"give {option} {example} or another number, or leave it out"
            raise ArgumentFault(f"{option} {value}", "must be at least 1", remedy, code="number-low")
    share = getattr(args, "mem_fraction_static", None)
    if share is not None and not 0 < share <= 1:
        raise ArgumentFault(
            f"{FRACTION} {share:g}",
            "must be above 0 and at most 1: it is the share of the memory for weights and cache",
            f"give {FRACTION} 0.85 or another share, or leave it out",
            code="number-low" if share <= 0 else "number-high",
        )


def unknown_algorithm(name: str, known: Collection[str]) -> ArgumentFault:
    """The refusal of an algorithm that nobody registered, with the nearest name."""
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.4)
    return ArgumentFault(
        f"--speculative-algorithm {name}",
        f"is none of {', '.join(sorted(known))}",
        f"give {near[0] if near else 'EAGLE3'}",
        code="algorithm",
    )


def _check_ranges(given: Numbers, *, lowest_steps: int, context_length: int | None) -> None:
    highest = MAX_DRAFT_TOKENS
    why = "one GPU thread each in the tree kernels"
    if context_length is not None and context_length <= highest:
        highest = context_length - 1
        why = f"less than the context length of {context_length}"
    _check_range(STEPS, given.steps, lowest_steps, highest - 1, why, "2")
    _check_range(TOPK, given.topk, 1, highest - 1, why, "1")
    _check_range(TOKENS, given.tokens, 2, highest, why, "3")


def _check_range(option: str, value: object, lowest: int, highest: int, why: str, example: str) -> None:
    if value is None:
        return
    remedy = f"give {option} {example}, the usual value, or leave it out"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentFault(
            f"{option} {value!r}",
            f"must be a whole number from {lowest} to {highest}",
            remedy,
            code="number-type",
        )
    if value < lowest:
        raise ArgumentFault(f"{option} {value}", f"must be at least {lowest}", remedy, code="number-low")
    if value > highest:
        raise ArgumentFault(
            f"{option} {value}", f"must be at most {highest} ({why})", remedy, code="number-high"
        )


def _chain(given: Numbers) -> Resolution:
    steps, topk, tokens = given.steps, given.topk, given.tokens
    if steps is not None and tokens is not None and tokens != steps + 1:
        chain = f"{TOKENS} {steps + 1}, or {STEPS} {tokens - 1}"
        tree = "" if topk == 1 else f", or {TOPK} 2 or more for a tree"
        raise ArgumentFault(
            f"{TOKENS} {tokens} with {STEPS} {steps} and {f'{TOPK} 1' if topk == 1 else f'no {TOPK}'}",
            f"contradict each other, because a chain of {steps} steps verifies exactly {steps + 1} tokens",
            f"give {chain}{tree}",
            code="chain-width",
        )
    notes = []
    if steps is None:
        steps = DEFAULT_CHAIN_STEPS if tokens is None else tokens - 1
        reason = "the default of a chain" if tokens is None else f"{TOKENS} {tokens} less one"
        notes.append(f"{STEPS} filled in with {steps} ({reason})")
    if topk is None:
        topk = 1
        notes.append(f"{TOPK} filled in with 1 (a chain)")
    if tokens is None:
        tokens = steps + 1
        notes.append(
            f"{TOKENS} filled in with {tokens} (a chain of {steps} steps and the target's own token)"
        )
    return Resolution(Numbers(steps, topk, tokens), tuple(notes))


def tree_capacity(steps: int, topk: int) -> int:
    """Draft tokens that ``steps`` levels of ``topk`` branches can yield, the root included.

    The first level has ``topk`` nodes; every later one expands its best ``topk`` into ``topk`` each.
    """
    return 1 + topk + (steps - 1) * topk * topk


def _tree(given: Numbers, topk: int) -> Resolution:
    steps, tokens = given.steps, given.tokens
    if steps is None or tokens is None:
        missing = " and ".join(
            option for option, value in ((STEPS, steps), (TOKENS, tokens)) if value is None
        )
        raise ArgumentFault(
            f"{TOPK} {topk} without {missing}",
            "leaves open how deep the tree is and how many of its tokens are verified",
            f"give {missing} too, or {TOPK} 1 for a chain",
            code="tree-open",
        )
    capacity = tree_capacity(steps, topk)
    if tokens > capacity:
        raise ArgumentFault(
            f"{TOKENS} {tokens}",
            f"is more than the {capacity} tokens that {STEPS} {steps} and {TOPK} {topk} can yield",
            f"give {TOKENS} {capacity} or fewer, or more steps",
            code="tree-width",
        )
    return Resolution(given)
