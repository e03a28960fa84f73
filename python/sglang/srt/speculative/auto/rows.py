"""The target's hidden states of tokens that the draft has not seen yet.

The draft's KV row at position p is made from the target's hidden state there and the token that follows. While the
target decodes plainly these rows are owed; what they are made from waits here, in a ring for each request slot.
Slot 0 of the request pool belongs to padding.
"""

from __future__ import annotations

from typing import Any

import torch

# A ring of all requests is kept below this, as long as it holds FEWEST rows a request. Writing the rows costs about one
# pass of a one-layer draft launched by hand, whatever their number: with MOST that is once in so many steps.
MOST_BYTES = 256 << 20
MOST, FEWEST = 128, 4


def span_for(slots: int, width: int, item_bytes: int) -> int:
    """Rows a request: as many as fit into MOST_BYTES, from FEWEST to MOST."""
    return max(FEWEST, min(MOST, MOST_BYTES // max(1, slots * width * item_bytes)))


def ring_bytes(slots: int, span: int, width: int, item_bytes: int) -> int:
    """Bytes of a ring: hidden states, and the token behind each."""
    return slots * span * (width * item_bytes + 8)


class RowRing:
    """``span`` rows for each request slot, filed under position modulo ``span``.

    Args:
        slots: request slots, the padding slot included.
        span: rows a request.
        width: columns of the target's hidden states (three hidden sizes for EAGLE-3).
        dtype: of the hidden states.
        device: where they are.
    """

    def __init__(
        self, slots: int, span: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.span, self.width = span, width
        self.hidden = torch.zeros(slots, span, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(slots, span, dtype=torch.int64, device=device)

    def store(
        self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Keep one row a request.

        Args:
            slots: request slots ``[B]``, integers.
            positions: position of each row ``[B]``, integers.
            hidden: ``[B, width]``.
            tokens: the token that follows each position ``[B]``, integers.
        """
        if hidden.is_cuda:
            _store_on_gpu(self, slots, positions, hidden, tokens)
            return
        place = positions.to(torch.int64) % self.span
        index = slots.to(torch.int64)
        self.hidden[index, place] = hidden.to(self.hidden.dtype)
        self.tokens[index, place] = tokens.to(torch.int64)

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[N, width]`` and following tokens ``[N]`` of rows stored before."""
        index, place = slots.to(torch.int64), positions.to(torch.int64) % self.span
        return self.hidden[index, place], self.tokens[index, place]

    @property
    def bytes(self) -> int:
        """Memory of the ring."""
        return self.hidden.nbytes + self.tokens.nbytes


def _store_on_gpu(
    ring: RowRing, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor
) -> None:
    from sglang.srt.speculative.auto.rows_kernel import BLOCK, store_rows

    parts = -(-ring.width // BLOCK)
    launch: Any = store_rows
    launch[(hidden.shape[0], parts)](
        hidden,
        tokens,
        slots,
        positions,
        ring.hidden,
        ring.tokens,
        hidden.stride(0),
        ring.width,
        ring.span,
        BLOCK,
    )
