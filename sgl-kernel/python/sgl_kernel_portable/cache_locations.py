"""Moves between the request-to-slot table and packed lists of KV slots.

`req_to_token` is the table [max_requests, pool_len] (int32): row r, column p is the KV slot that holds
position p of request r. Packed lists hold one run of slots per request, request after request.
All index arguments may be int32 or int64. Every function writes its result into an argument and returns
nothing, as the compiled ops do.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
]


def _check_table(op: str, req_to_token: Tensor, pool_len: int) -> None:
    if req_to_token.dim() != 2 or req_to_token.shape[1] != pool_len:
        raise ValueError(
            f"{op}: req_to_token has shape {tuple(req_to_token.shape)}, expected two dimensions with "
            f"{pool_len} columns; pass the pool's own table and its width"
        )


def _table_cells(op: str, rows: Tensor, start: Tensor, end: Tensor, pool_len: int) -> tuple[Tensor, Tensor]:
    """Return (row, column) of every table cell of the ranges [start, end), packed by request, int64."""
    first = start.to(torch.int64)
    length = end.to(torch.int64) - first
    # A range that leaves the row would silently read or overwrite the neighbouring request's slots.
    if length.numel() and (int(length.min()) < 0 or int(first.min()) < 0 or int(end.max()) > pool_len):
        raise IndexError(
            f"{op}: ranges start={start.tolist()} end={end.tolist()} leave the table of {pool_len} columns; "
            "lower the context length or give the pool wider rows"
        )
    row = torch.repeat_interleave(rows.to(torch.int64), length)
    shift = first - (torch.cumsum(length, 0) - length)
    column = torch.arange(row.numel()) + torch.repeat_interleave(shift, length)
    return row, column


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write packed slots into the table.

    Columns [start_offset[i], end_offset[i]) of row `req_pool_indices[i]` receive the next
    `end - start` entries of `out_cache_loc`. Shapes: [bs], [max_requests, pool_len], [bs], [bs],
    [>= sum(end - start)].

    Raises:
        ValueError: the table's shape does not match `pool_len`, or too few slots are given.
        IndexError: a range leaves the table.
    """
    op = "assign_req_to_token_pool_cpu"
    _check_table(op, req_to_token, pool_len)
    row, column = _table_cells(op, req_pool_indices, start_offset, end_offset, pool_len)
    if out_cache_loc.numel() < row.numel():
        raise ValueError(f"{op}: {row.numel()} slots are needed, out_cache_loc holds {out_cache_loc.numel()}")
    req_to_token[row, column] = out_cache_loc[: row.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the slots of the ranges [start, end) out of the table into `out_cache_loc`, packed.

    `out_cache_loc` (int64) may be longer than the packed length; its tail is left untouched.

    Raises:
        ValueError: the table's shape does not match `pool_len`, or `out_cache_loc` is too short.
        IndexError: a range leaves the table.
    """
    op = "assign_extend_cache_locs_cpu"
    _check_table(op, req_to_token, pool_len)
    row, column = _table_cells(op, req_pool_indices, start_offset, end_offset, pool_len)
    if out_cache_loc.numel() < row.numel():
        raise ValueError(f"{op}: {row.numel()} slots are needed, out_cache_loc holds {out_cache_loc.numel()}")
    out_cache_loc[: row.numel()] = req_to_token[row, column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` slots that follow each request's tokens.

    Block i of `out_cache_loc` (int64, [bs * topk * num_steps]) receives columns
    [seq_lens[i], seq_lens[i] + topk * num_steps) of row `req_pool_indices[i]`.

    Raises:
        ValueError: the table's shape does not match `pool_len`, or `out_cache_loc` is too short.
        IndexError: a range leaves the table.
    """
    width = topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + width, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Return one table row per draft branch.

    Row `i * topk + t` of the result ([bs * topk, pool_len], dtype of `req_to_token`) holds the
    `seq_lens[i]` slots of request i followed by the `num_steps` slots of its branch t. Columns beyond are 0.

    Raises:
        ValueError: the table's shape does not match `pool_len`.
        IndexError: a branch leaves the table.
    """
    op = "build_draft_decode_metadata_cpu"
    _check_table(op, req_to_token, pool_len)
    table = torch.zeros(req_pool_indices.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for i, (row, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        if seq_len + topk * num_steps > pool_len:
            raise IndexError(
                f"{op}: request {i} needs {seq_len} + {topk} * {num_steps} columns, the table has {pool_len}"
            )
        branches = table[i * topk : (i + 1) * topk]
        branches[:, :seq_len] = req_to_token[row, :seq_len]
        drafted = req_to_token[row, seq_len : seq_len + topk * num_steps]
        branches[:, seq_len : seq_len + num_steps] = drafted.view(topk, num_steps)
    return table
