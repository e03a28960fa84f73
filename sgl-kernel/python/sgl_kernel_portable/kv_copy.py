"""Copy of whole KV rows between slots, for every layer's buffers at once."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

__all__ = ["copy_all_layer_kv_cache_cpu"]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy row `src_loc[i]` to row `tgt_loc[i]` in each of the raw buffers.

    Args:
        data_ptrs: uint64 [buffers], address of row 0 of each K or V buffer.
        strides: int64 [buffers], bytes from one row to the next, all of which are copied.
        tgt_loc, src_loc: int32 or int64 [rows], slot numbers. All sources are read before any target is
            written, so the two may overlap.

    Raises:
        ValueError: the lists differ in length or hold a negative slot. Addresses cannot be checked:
            the caller owns the buffers and vouches that they hold every slot named.
    """
    if data_ptrs.numel() != strides.numel() or tgt_loc.numel() != src_loc.numel():
        raise ValueError(
            f"copy_all_layer_kv_cache_cpu: {data_ptrs.numel()} buffers with {strides.numel()} strides, "
            f"{src_loc.numel()} sources with {tgt_loc.numel()} targets; each pair must have one length"
        )
    if src_loc.numel() == 0:
        return
    source = src_loc.numpy()
    target = tgt_loc.numpy()
    if min(source.min(), target.min()) < 0:
        raise ValueError(
            "copy_all_layer_kv_cache_cpu: negative slot number; -1 marks an empty entry upstream"
        )
    rows = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        raw = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        view = np.frombuffer(raw, dtype=np.uint8).reshape(rows, stride)
        view[target] = view[source]
