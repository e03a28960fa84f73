"""A custom logit processor is its client's code: what is wrong with it ends that client's request and nobody else's.

Pure parts of the topic ``run-processor-guard``: does a text hold a serialised processor at all, and a wrapper that runs
one so that an exception costs the rows which raise it.
"""

from __future__ import annotations

import json
import logging
import pickletools
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Where a request keeps what its processor raised, for the sentence with which it ends.
FAULT = "run_processor_fault"
REMEDY = "send what CustomLogitProcessor.to_str() returns"
_SHOWN = 60

Processor = Callable[[torch.Tensor, Any], torch.Tensor]


def text_fault(value: Any) -> str | None:
    """Why ``value`` cannot be a serialised processor, in one sentence with the remedy; None where it may be one.

    Nothing of it is executed: the pickle is read instruction by instruction, as ``pickletools`` prints them.
    """

    def told(reason: str) -> str:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown)} characters)"
        return f"custom_logit_processor = {shown} is no serialised processor: {reason}; {REMEDY}"

    if not isinstance(value, str):
        return told("it must be text")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        return told("it is not JSON")
    if not isinstance(fields, dict) or not isinstance(fields.get("callable"), str):
        return told('it is not an object with a text under "callable"')
    try:
        pickled = bytes.fromhex(fields["callable"])
    except ValueError:
        return told('"callable" is not hexadecimal')
    try:
        for _ in pickletools.genops(pickled):
            pass
    except Exception as error:
        return told(f'"callable" is no pickle ({error})')
    return None


def load_fault(text: str, load: Callable[[str], Any]) -> str | None:
    """Why ``load`` (upstream's ``from_str``) cannot make a processor of ``text``; None where it can."""
    try:
        loaded = load(text)
    except Exception as error:
        return (
            f"custom_logit_processor cannot be loaded here: {type(error).__name__}: {error}; "
            f"its module must be importable on the server, and its class must need no arguments; {REMEDY}"
        )
    if callable(loaded):
        return None
    return f"custom_logit_processor is a {type(loaded).__name__}, which cannot be called; {REMEDY}"


class Guarded:
    """A processor whose exceptions cost the rows that raise them.

    All rows go through at once, as without the guard. Where that raises, each row goes through alone with its own
    parameters; a row that raises again becomes NaN, and the topic ``run-nonfinite`` ends its request.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor = processor

    def __call__(self, logits: torch.Tensor, parameters: Any = None) -> torch.Tensor:
        """``logits`` float ``[rows, V]``, one entry of ``parameters`` a row; the processed rows, same shape."""
        # It may write in place and raise afterwards.
        before = logits.clone()
        try:
            return _checked(self.processor(logits, parameters), before)
        except Exception as error:
            first = error
        rows = []
        for row, own in zip(torch.split(before, 1), parameters or [None] * len(before), strict=True):
            try:
                rows.append(_checked(self.processor(row.clone(), [own]), row))
            except Exception as error:
                first = error
                _remember(own, f"{type(self.processor).__name__} raised {type(error).__name__}: {error}")
                rows.append(torch.full_like(row, float("nan")))
        logger.warning(
            "custom logit processor %s raised %s: %s; its rows were processed one by one",
            type(self.processor).__name__,
            type(first).__name__,
            first,
        )
        return torch.cat(rows) if rows else before


def _checked(answer: Any, given: torch.Tensor) -> torch.Tensor:
    if not isinstance(answer, torch.Tensor) or answer.shape != given.shape:
        got = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
        raise TypeError(f"it returned {got} where logits of shape {tuple(given.shape)} are wanted")
    return answer


def _remember(parameters: Any, fault: str) -> None:
    """Keep the fault at the request, if the row tells which it is (``__req__`` is there with ``custom_params``)."""
    request = parameters.get("__req__") if isinstance(parameters, dict) else None
    # A row of a verify shows a view of its request.
    request = getattr(request, "_request", request)
    if request is not None:
        setattr(request, FAULT, fault)
