"""Test-only logit processors; the servers import this file by its bare name, so their pickles stay references."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class PoisonAt(CustomLogitProcessor):
    """Makes the logits NaN at output length ``poison_at``, as an overflow in the model would."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, parameters in zip(logits, custom_param_list or [], strict=True):
            if parameters and len(parameters["__req__"].output_ids) == parameters["poison_at"]:
                row.fill_(float("nan"))
        return logits


class EveryOther(CustomLogitProcessor):
    """Bans the newest output token: a processor that is wrong on any row whose history is wrong."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, parameters in zip(logits, custom_param_list or [], strict=True):
            for token in (parameters or {})["__req__"].output_ids[-parameters["ban"] :] if parameters else ():
                row[token] = float("-inf")
        return logits


class Says(CustomLogitProcessor):
    """Lets only the next token of ``say`` through: a model that writes what the test wants parsed."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, parameters in zip(logits, custom_param_list or [], strict=True):
            if parameters:
                say = parameters["say"]
                token = say[min(len(parameters["__req__"].output_ids), len(say) - 1)]
                kept = row[token].item()
                row.fill_(float("-inf"))
                row[token] = kept
        return logits


class Raises(CustomLogitProcessor):
    """Raises at output length ``raise_at``, as a processor with a fault does."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for parameters in custom_param_list or []:
            if parameters and len(parameters["__req__"].output_ids) == parameters["raise_at"]:
                raise KeyError("what the client forgot")
        return logits
