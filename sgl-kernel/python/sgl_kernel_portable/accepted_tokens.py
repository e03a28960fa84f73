"""Small gathers over the tokens that a verify step accepted."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fill_accept_out_cache_loc_cpu", "fill_bonus_tokens_cpu", "rotate_input_ids_cpu"]


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Write each request's last accepted token into `bonus_tokens` ([bs], int32).

    `accept_tokens` holds `accept_stride` tokens a request; `accept_lens[i]` >= 1 of them count (the bonus
    token included).

    Raises:
        ValueError: an accept length outside [1, accept_stride].
    """
    lengths = accept_lens.to(torch.int64)
    if lengths.numel() and not 1 <= int(lengths.min()) <= int(lengths.max()) <= accept_stride:
        raise ValueError(
            f"fill_bonus_tokens_cpu: accept lengths {lengths.tolist()} outside [1, {accept_stride}]; "
            "a verify step always yields at least the bonus token"
        )
    last = torch.arange(lengths.numel()) * accept_stride + lengths - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int | None = None
) -> None:
    """Pack the KV slots of the accepted nodes at the front of `accept_out_cache_loc`.

    `accept_index` (any shape) holds global node numbers, -1 where nothing was accepted; `out_cache_loc`
    is indexed by them. Entries behind the packed ones are left untouched. `size`, which some callers pass,
    limits how many entries of `accept_index` are read; by default all are.
    """
    wanted = accept_index.reshape(-1)[:size].to(torch.int64)
    slots = out_cache_loc[wanted[wanted >= 0]]
    accept_out_cache_loc[: slots.numel()] = slots.to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's ids one place to the left, in place, and put its new token at the end.

    Request i owns `input_ids[start : start + length]`. Its new token `topk_index[i]` goes to
    `select_index[i]` (a place in `input_ids`) where that is given, else to the segment's last place.
    Empty segments are left alone.
    """
    new_tokens = topk_index.reshape(-1).tolist()
    places = None if select_index is None else select_index.tolist()
    for i, (start, length) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[start + length - 1 if places is None else places[i]] = new_tokens[i]
