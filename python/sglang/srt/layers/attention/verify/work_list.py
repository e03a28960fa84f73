"""The work list of a forward pass: written once on the device, read by every layer's split and merge (``warpgroup_list.cuh``).

Which keys a block takes depends on lengths, request indices and the plan, which are the same in all layers of a forward pass.
A list is good for the calls that follow the one it was written for, as long as nothing says that it might not be:

* the calls belong to one forward pass: one batch object, layers in rising order (the next pass, a warm-up or a repeated
  capture begins with a lower layer), no metadata initialised in between;
* everything that it was made from is the same: tensors by address (they are kept alive meanwhile, so an address means one
  tensor), strides, element types, plan;
* the same stream, and the same capture of a graph or none: a graph must contain the launch that writes its list.

Otherwise a list is written anew: a doubt costs a launch and no list is ever older than its reader. Each is new memory from
PyTorch's allocator, in a capture of the graph's own, so calls that interleave never share one.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.fused_build import WARPGROUP_LINE
from sglang.srt.layers.attention.verify.plan import SplitPlan

Key = tuple[Hashable, ...]


def _identity(tensor: torch.Tensor | None) -> Key | None:
    if tensor is None:
        return None
    # What torch changed in place has another version; a tensor made in inference mode has none.
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tensor.dtype, tensor.stride(), version)


def list_key(plan: SplitPlan, context: KVContext, stream: int, capture: Hashable) -> Key:
    """All that a work list depends on, and where it can be read.

    ``capture``: which capture of a graph the stream is in.
    """
    return (
        plan.request.batch,
        plan.request.tokens,
        plan.target,
        plan.items,
        plan.splits.min_keys,
        context.lens_include_new,
        _identity(context.seq_lens),
        _identity(context.req_pool_indices),
        _identity(context.req_to_token),
        _identity(context.kv_indptr),
        _identity(context.kv_indices),
        stream,
        capture,
    )


def allocate(items: int, device: torch.device) -> torch.Tensor:
    """Room for a list, int32 [items, words of a line]."""
    return torch.empty(items, WARPGROUP_LINE, dtype=torch.int32, device=device)


@dataclass
class PassList:
    """The list of the forward pass that is under way, if it has one. Nothing is launched here.

    ``enter`` before each call tells passes apart; who calls without it says ``begin`` where one begins.
    """

    _key: Key | None = None
    _list: torch.Tensor | None = None
    _read: tuple[torch.Tensor | None, ...] = ()
    _layer: int = -1
    _batch: weakref.ReferenceType[Any] | None = None
    written: int = field(default=0, compare=False)
    """How many lists were handed out to be written."""

    def begin(self) -> None:
        """Whatever comes next belongs to another forward pass."""
        self._key = self._list = self._batch = None
        self._read = ()
        self._layer = -1

    def enter(self, layer: int, batch: Any) -> None:
        """Layer number ``layer`` (negative if it has none) is about to attend for the batch object ``batch``."""
        if layer <= self._layer or layer < 0 or self._batch is None or self._batch() is not batch:
            self.begin()
            try:
                self._batch = weakref.ref(batch)
            except TypeError:
                # What cannot be told from its successor in the same place begins a pass with each call.
                self._batch = None
        self._layer = layer

    def take(
        self, plan: SplitPlan, context: KVContext, stream: int, capture: Hashable
    ) -> tuple[torch.Tensor, bool]:
        """The list for a call, int32 [items, words], and whether it must be written first."""
        key = list_key(plan, context, stream, capture)
        if self._list is not None and key == self._key:
            return self._list, False
        self._list = allocate(plan.items, context.seq_lens.device)
        self._key = key
        self._read = (
            context.seq_lens,
            context.req_pool_indices,
            context.req_to_token,
            context.kv_indptr,
            context.kv_indices,
        )
        self.written += 1
        return self._list, True
