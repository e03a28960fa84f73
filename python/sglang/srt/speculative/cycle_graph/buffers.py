"""The owner of every tensor that a captured cycle of one batch size reads or writes.

Three kinds: *ours* (allocated here), *pass inputs and outputs* (static buffers of upstream's graph runners, pointed
at; several runners may share one allocation, so the order of writes in ``program`` matters), and *relay* (upstream's
``FutureMap``, pointed at, indexed by request row). The host writes only through ``steps.load``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Places of ``control``.
LIVE, SLOT, SIMULATED, COUNTER = 0, 1, 2, 3
# Results of this many cycles can be unread on the host: overlapped scheduling has at most two in flight.
RING = 4
# Length, row and slot of a padded request. Row 0 of upstream's table is all zeros and slot 0 is nobody's.
PAD_LENGTH = 1
# Boundaries whose time each cycle leaves behind: begin, verify inputs, accept, accepted, relayed.
MARKS = 5


@dataclass(frozen=True)
class Control:
    """What the host sets before each cycle.

    Attributes:
        state: int32 [4]: live requests, ring slot, simulated accept length (0: real), number of the cycle.
        rows: int64 [B], row of each request in the request table; 0 for padding.
    """

    state: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of the batch, filled before each sampled cycle; padding is greedy.

    ``temperatures``, ``top_ps``, ``min_ps`` float32 [B]; ``top_ks`` int32 [B].
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, device: torch.device) -> Sampling:
        """All requests greedy."""

        def make(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((batch,), value, dtype=dtype, device=device)

        return cls(make(1.0), make(1, torch.int32), make(1.0), make(0.0))


@dataclass(frozen=True)
class DraftInputs:
    """Static inputs of the draft pass, and the tokens it proposes.

    Shapes for B requests, S steps, H hidden: ``rows``, ``lens``, ``positions`` int64 [B]; ``slots`` int64 [B * S];
    ``token`` int64 [B, 1] (first draft, in the draft's vocabulary); ``probability`` float32 [B, 1]; ``hidden`` [B, H];
    ``proposed`` int64 [B, S], the output.
    """

    rows: torch.Tensor
    lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    token: torch.Tensor
    probability: torch.Tensor
    hidden: torch.Tensor
    proposed: torch.Tensor


@dataclass(frozen=True)
class VerifyInputs:
    """Static inputs of target verify, and its outputs.

    Shapes for W = S + 1 rows a request: ``rows``, ``lens`` int64 [B]; ``tokens``, ``positions``, ``slots`` int64
    [B * W]; ``logits`` float [B * W, V]; ``hidden`` [B * W, A], the packed auxiliary states,
    or [B * W, H] where verify projects them for the draft.
    """

    rows: torch.Tensor
    lens: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class ExtendInputs:
    """Static inputs of draft extend, and its outputs.

    As ``VerifyInputs``, with ``hidden`` [B * W, A] as input, ``correct``, ``accepted``, ``widths`` int32 [B],
    ``logits`` [B * W, D] and ``states`` [B * W, H] as outputs.
    """

    rows: torch.Tensor
    lens: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor
    correct: torch.Tensor
    accepted: torch.Tensor
    widths: torch.Tensor
    logits: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class Relay:
    """Upstream's relay between steps, one entry a request row (R rows).

    ``lengths`` int64 [R]; ``bonus`` int64 [R]; ``token`` int64 [R, 1]; ``probability`` float32 [R, 1];
    ``hidden`` [R, H].
    """

    lengths: torch.Tensor
    bonus: torch.Tensor
    token: torch.Tensor
    probability: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class Results:
    """What the host reads of a cycle: pinned memory that the accept step writes itself, so nothing is copied.

    ``tokens`` int32 [RING, B * W]; ``lengths`` and ``good`` int32 [RING, B]; ``marks`` int64 [RING, MARKS],
    nanoseconds of the device's clock.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    good: torch.Tensor
    marks: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, width: int, device: torch.device) -> Results:
        """Zeroed; pinned where there is a GPU."""
        pinned = device.type == "cuda"

        def make(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(RING, columns, dtype=dtype, pin_memory=pinned)

        return cls(
            make(batch * width, torch.int32),
            make(batch, torch.int32),
            make(batch, torch.int32),
            make(MARKS, torch.int64),
        )


@dataclass(frozen=True)
class Scratch:
    """Ours, between the steps of one cycle.

    ``prefix`` and ``bonus`` int64 [B]; ``kept`` int32 [B], accepted tokens with the bonus (1 for padding);
    ``maxima`` float32 and ``indices`` int32 [B * W, P]: partial maxima of the target's rows;
    ``draft_maxima``, ``draft_indices`` [B, P']: the same of the draft's selected row.
    """

    prefix: torch.Tensor
    bonus: torch.Tensor
    kept: torch.Tensor
    maxima: torch.Tensor
    indices: torch.Tensor
    draft_maxima: torch.Tensor
    draft_indices: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, width: int, parts: int, draft_parts: int, device: torch.device) -> Scratch:
        """Uninitialised but for ``kept``."""

        def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            make(batch, dtype=torch.int64),
            make(batch, dtype=torch.int64),
            torch.ones(batch, dtype=torch.int32, device=device),
            make(batch * width, parts, dtype=torch.float32),
            make(batch * width, parts, dtype=torch.int32),
            make(batch, draft_parts, dtype=torch.float32),
            make(batch, draft_parts, dtype=torch.int32),
        )


@dataclass(frozen=True)
class CycleBuffers:
    """Everything of one captured batch size.

    Attributes:
        batch: requests, padding included (B).
        width: rows of a request in verify and draft extend (W).
        table: upstream's request table, int32 [R, context], slots by row and position.
        real_tokens: simulated acceptance keeps the draft's tokens instead of a fixed one.
        sampling: parameters of a cycle whose rows are drawn; None where they are the argmax.
    """

    batch: int
    width: int
    table: torch.Tensor
    control: Control
    draft: DraftInputs
    verify: VerifyInputs
    extend: ExtendInputs
    relay: Relay
    results: Results
    scratch: Scratch
    real_tokens: bool = False
    sampling: Sampling | None = None

    @property
    def steps(self) -> int:
        """Drafts a request (S)."""
        return self.width - 1

    @property
    def hidden_shared(self) -> bool:
        """Whether draft extend reads its hidden states where verify leaves them."""
        return self.extend.hidden.data_ptr() == self.verify.hidden.data_ptr()

    def check(self) -> None:
        """Raise ValueError when a tensor has another shape or layout than its description says."""
        b, w, s = self.batch, self.width, self.steps
        expected = (
            ("rows", self.control.rows, (b,)),
            ("draft.lens", self.draft.lens, (b,)),
            ("draft.positions", self.draft.positions, (b,)),
            ("draft.slots", self.draft.slots, (b * s,)),
            ("draft.token", self.draft.token, (b, 1)),
            ("draft.proposed", self.draft.proposed, (b, s)),
            ("verify.lens", self.verify.lens, (b,)),
            ("verify.tokens", self.verify.tokens, (b * w,)),
            ("verify.positions", self.verify.positions, (b * w,)),
            ("verify.slots", self.verify.slots, (b * w,)),
            ("extend.tokens", self.extend.tokens, (b * w,)),
            ("extend.lens", self.extend.lens, (b,)),
            ("extend.accepted", self.extend.accepted, (b,)),
            ("extend.hidden", self.extend.hidden, tuple(self.verify.hidden.shape)),
            ("relay.hidden", self.relay.hidden, (self.relay.lengths.shape[0], self.draft.hidden.shape[1])),
            ("extend.states", self.extend.states, (b * w, self.draft.hidden.shape[1])),
        )
        for name, tensor, shape in expected:
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, needs {shape}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        for name, tensor in (("verify.logits", self.verify.logits), ("extend.logits", self.extend.logits)):
            if tensor.dim() != 2 or tensor.shape[0] != b * w or tensor.stride(1) != 1:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, needs [{b * w}, vocabulary] with dense rows"
                )
