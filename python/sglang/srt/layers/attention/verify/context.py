"""Where the keys of each request lie: the device tensors a call reads its lengths and slots from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVContext:
    """Device-side addressing of one batch. Nothing here is read on the host.

    A call may start before the kernel launched just before it has ended. It then reads lengths, slots and the cache
    rows of all keys but the last ``tokens`` of each request at once; queries and the new rows only after that
    kernel's end. So nothing of the former may be written by the kernel directly before the attention call, nor by one
    further back if every kernel from there on lets the next one start before it has written (a kernel launched the
    ordinary way starts when all before it is over). In a model the write of the new rows stands there, and older
    rows are a forward pass old; ``test/kernels/test_early_reads.py`` lists the writers that let others start.

    Either ``req_to_token`` ([max_reqs, max_context] int32 slot ids) with ``req_pool_indices`` ([bs] int32 or
    int64), or ``kv_indices`` (slot ids, int32 or int64) with ``kv_indptr`` ([bs + 1] int32).

    ``seq_lens`` ([bs] int32 or int64) is the length of each request. ``lens_include_new`` says whether it
    counts the ``tokens`` query rows of this call: False for target verify (length of the prefix), True for
    decode and draft extend. With L = the length *including* them, row t sees keys [0, L - tokens + t + 1).
    A request with L <= 0 or a negative ``req_pool_indices`` entry is padding: it reads no KV, its output rows
    are zero and its LSE is -inf. A row whose limit is <= 0 is treated likewise.

    ``tree_mask`` (bool or uint8) restricts which of the ``tokens`` new keys each row sees, on top of the
    whole prefix: ``[bs * tokens * tokens]``, or with ``mask_indptr`` ([bs + 1] int64) the full layout where
    request b has ``tokens`` rows of (prefix + tokens) entries from ``mask_indptr[b]`` on.
    """

    seq_lens: torch.Tensor
    lens_include_new: bool
    req_to_token: torch.Tensor | None = None
    req_pool_indices: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None

    def check(self, batch: int, tokens: int) -> None:
        """Raise ValueError when the tensors disagree with each other or with (batch, tokens)."""
        if self.seq_lens.shape[0] < batch:
            raise ValueError(
                f"seq_lens has {self.seq_lens.shape[0]} entries for a batch of {batch}; pass one length a request"
            )
        table = self.req_to_token is not None
        if table == (self.kv_indices is not None):
            raise ValueError("give exactly one of req_to_token and kv_indices")
        if self.req_to_token is not None:
            if self.req_pool_indices is None or self.req_pool_indices.shape[0] < batch:
                raise ValueError(f"req_to_token needs req_pool_indices with at least {batch} entries")
            if self.req_to_token.dim() != 2 or self.req_to_token.stride(1) != 1:
                raise ValueError("req_to_token must be [max_reqs, max_context] with contiguous rows")
        elif self.kv_indptr is None or self.kv_indptr.shape[0] < batch + 1:
            raise ValueError(f"kv_indices needs kv_indptr with at least {batch + 1} entries")
        if self.tree_mask is None:
            if self.mask_indptr is not None:
                raise ValueError("mask_indptr without tree_mask")
        elif self.mask_indptr is None and self.tree_mask.numel() < batch * tokens * tokens:
            raise ValueError(
                f"tree_mask has {self.tree_mask.numel()} entries, needs batch*tokens*tokens = "
                f"{batch * tokens * tokens}; pass mask_indptr for the full layout"
            )
