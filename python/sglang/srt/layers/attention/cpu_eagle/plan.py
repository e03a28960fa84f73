"""Which KV slots each request reads in one forward pass, and which of them each query sees.

Plans are made once per forward pass and serve every layer. All tensors are on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["AttentionPlan", "decode_plan", "draft_step_plan", "extend_plan", "verify_plan"]


@dataclass(frozen=True)
class AttentionPlan:
    """The KV slots and masks of a batch.

    Attributes:
        slots: int64 [bs, longest], pool rows in token order. A short row is padded by repeating one of the
            request's own rows, so that padding never reads memory that was not written.
        kv_lens: tokens each request reads, at most `longest`.
        query_lens: queries of each request; their sum is the rows of the layer's input.
        tails: None for causal order. Else bool [bs, query_len, tail]: which of the *last* `tail` tokens each
            query sees; all earlier tokens are seen. Only for equal query lengths.
    """

    slots: Tensor
    kv_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    tails: Tensor | None = None
    _masks: dict[int, Tensor | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def uniform(self) -> bool:
        """Whether all requests have the same number of queries."""
        return len(set(self.query_lens)) <= 1

    def mask(self, request: int, window: int = -1) -> Tensor:
        """Return the full mask of one request, bool [queries, tokens]."""
        queries, tokens = self.query_lens[request], self.kv_lens[request]
        column = torch.arange(tokens)
        if self.tails is not None:
            seen = self.tails[request]
            prefix = tokens - seen.shape[1]
            mask = torch.ones(queries, tokens, dtype=torch.bool)
            mask[:, prefix:] = seen
            if window >= 0:
                # Distance in a tree is distance in depth, not in place. What a query sees of the tail is its
                # own path in order, so a running count gives each seen node's depth.
                depth = seen.cumsum(dim=1) - 1
                own = seen.sum(dim=1, keepdim=True) - 1
                mask[:, prefix:] &= own - depth <= window
                mask[:, :prefix] &= column[:prefix] >= prefix + own - window
            return mask
        own = torch.arange(tokens - queries, tokens).unsqueeze(1)
        mask = column <= own
        if window >= 0:
            mask &= column >= own - window
        return mask

    def batched_mask(self, window: int = -1) -> Tensor | None:
        """Return bool [bs, queries, longest], or None where every query sees every slot.

        Only for equal query lengths. Made once; the layers of a forward pass share it.
        """
        if window not in self._masks:
            self._masks[window] = self._make_batched_mask(window)
        return self._masks[window]

    def _make_batched_mask(self, window: int) -> Tensor | None:
        queries = self.query_lens[0]
        longest = self.slots.shape[1]
        if queries == 1 and self.tails is None and window < 0 and min(self.kv_lens) == longest:
            return None
        if window >= 0:
            mask = torch.zeros(len(self.kv_lens), queries, longest, dtype=torch.bool)
            for request, tokens in enumerate(self.kv_lens):
                mask[request, :, :tokens] = self.mask(request, window)
            return mask
        length = torch.tensor(self.kv_lens).view(-1, 1, 1)
        column = torch.arange(longest).view(1, 1, -1)
        if self.tails is None:
            own = length - queries + torch.arange(queries).view(1, -1, 1)
            return column <= own
        bs, _, tail = self.tails.shape
        place = column - (length - tail)
        seen = torch.gather(self.tails, 2, place.clamp(0, tail - 1).expand(bs, queries, longest))
        return (place < 0) | (seen & (place < tail))


def _slots(table: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Return table cells [row, 0..length) as int64 [bs, longest], short rows padded with their last cell."""
    longest = int(lengths.max()) if lengths.numel() else 0
    column = torch.minimum(torch.arange(longest).unsqueeze(0), (lengths - 1).clamp(min=0).unsqueeze(1))
    return table[rows.to(torch.int64).unsqueeze(1), column].to(torch.int64)


def decode_plan(table: Tensor, rows: Tensor, seq_lens: Tensor) -> AttentionPlan:
    """Plan a plain decode step: one query a request, which is the last of its `seq_lens` tokens.

    Args:
        table: request-to-slot table, int32 [requests, columns].
        rows: table row of each request, [bs].
        seq_lens: tokens of each request, the new one included, [bs].
    """
    lengths = seq_lens.to(torch.int64)
    return AttentionPlan(_slots(table, rows, lengths), tuple(lengths.tolist()), (1,) * rows.numel())


def extend_plan(table: Tensor, rows: Tensor, seq_lens: Tensor, extend_lens: Tensor) -> AttentionPlan:
    """Plan a prefill, a chunk of one, or a draft extend: the last `extend_lens` tokens are the queries.

    Raises:
        ValueError: more new tokens than tokens.
    """
    lengths, queries = seq_lens.to(torch.int64), extend_lens.to(torch.int64)
    if bool((queries > lengths).any()):
        raise ValueError(
            f"extend lengths {queries.tolist()} exceed sequence lengths {lengths.tolist()}; sequence lengths must "
            "include the new tokens"
        )
    return AttentionPlan(_slots(table, rows, lengths), tuple(lengths.tolist()), tuple(queries.tolist()))


def verify_plan(
    table: Tensor, rows: Tensor, prefix_lens: Tensor, draft_token_num: int, tree: Tensor | None
) -> AttentionPlan:
    """Plan a target verify: `draft_token_num` queries a request, placed right after its prefix.

    Args:
        tree: None for a chain. Else the query-only mask, bool with bs * T * T cells: which nodes each node
            sees, itself included.
    """
    prefix = prefix_lens.to(torch.int64)
    lengths = prefix + draft_token_num
    bs = rows.numel()
    tails = None
    if tree is not None:
        cells = bs * draft_token_num * draft_token_num
        if tree.numel() < cells:
            raise ValueError(
                f"tree mask of {tree.numel()} cells, {bs} requests of {draft_token_num} nodes need {cells}; "
                "the CPU backend reads query-only masks (tree mask mode 1)"
            )
        tails = tree.view(-1)[:cells].view(bs, draft_token_num, draft_token_num).to(torch.bool)
    return AttentionPlan(
        _slots(table, rows, lengths), tuple(lengths.tolist()), (draft_token_num,) * bs, tails
    )


def draft_step_plan(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    *,
    step: int,
    num_steps: int,
    topk: int,
    page_size: int,
) -> AttentionPlan:
    """Plan draft step `step` (0-based): one query per branch, which sees the prefix and its own branch.

    The branches of a request share one read of its prefix: a request is `topk` queries over
    prefix + topk * (step + 1) slots, each blind to the other branches. Branch t's slots start at
    prefix + t * num_steps, or, where several branches meet pages of more than one slot, at its own
    page-aligned region.
    """
    prefix = prefix_lens.to(torch.int64)
    drafted = step + 1
    bs = rows.numel()
    if topk == 1:
        lengths = prefix + drafted
        return AttentionPlan(_slots(table, rows, lengths), tuple(lengths.tolist()), (1,) * bs)
    branch = torch.arange(topk).view(1, topk, 1)
    within = torch.arange(drafted).view(1, 1, drafted)
    if page_size == 1:
        start = prefix.view(bs, 1, 1) + branch * num_steps
    else:
        partial = prefix % page_size
        pages = (partial + num_steps + page_size - 1) // page_size
        start = prefix.view(bs, 1, 1) + branch * (pages * page_size).view(bs, 1, 1)
    own = (start + within).reshape(bs, topk * drafted)
    tail = topk * drafted
    lengths = prefix + tail
    longest = int(lengths.max())
    place = torch.arange(longest).unsqueeze(0) - prefix.unsqueeze(1)
    drafted_column = torch.gather(own, 1, place.clamp(0, tail - 1))
    column = torch.where(place < 0, torch.arange(longest).unsqueeze(0), drafted_column)
    slots = table[rows.to(torch.int64).unsqueeze(1), column].to(torch.int64)
    tails = torch.eye(topk, dtype=torch.bool).repeat_interleave(drafted, dim=1).expand(bs, topk, tail)
    return AttentionPlan(slots, tuple(lengths.tolist()), (topk,) * bs, tails)
