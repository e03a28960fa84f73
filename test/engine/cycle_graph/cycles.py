"""Random cycles: buffers with poisoned memory, shared as upstream's runners share them, and stand-in passes."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.buffers import (
    Control,
    CycleBuffers,
    DraftInputs,
    ExtendInputs,
    Relay,
    Results,
    Scratch,
    VerifyInputs,
)

POISON = -(2**30)


@dataclass(frozen=True)
class Shape:
    """Sizes of a cycle; odd and prime where they may be."""

    batch: int = 3
    live: int = 2
    width: int = 3
    vocabulary: int = 37
    draft_vocabulary: int = 23
    hidden: int = 19
    packed: int = 57
    requests: int = 11
    context: int = 41
    shared: bool = True


def make(shape: Shape, seed: int, parts: int = 1, draft_parts: int = 1, device: str = "cpu") -> CycleBuffers:
    """Buffers of ``shape`` whose outputs hold poison; ``shared`` aliases what upstream's runners alias."""
    generator = torch.Generator().manual_seed(seed)
    b, w, s = shape.batch, shape.width, shape.width - 1

    def integers(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(size, POISON, dtype=dtype, device=device)

    def nans(*size: int) -> torch.Tensor:
        return torch.full(size, float("nan"), device=device)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    rows, lens = integers(b), integers(b)
    tokens, positions, slots = (integers(b * w) for _ in range(3))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if shape.shared else tensor.clone()

    table = torch.zeros(shape.requests, shape.context, dtype=torch.int32)
    table[1:] = (
        torch.randperm((shape.requests - 1) * shape.context, generator=generator).view(-1, shape.context) + 1
    )
    lengths = torch.randint(0, shape.context - 4 * w, (shape.requests,), generator=generator)
    relay = Relay(
        lengths=lengths.to(device),
        bonus=torch.randint(0, shape.vocabulary, (shape.requests,), generator=generator).to(device),
        token=torch.randint(0, shape.draft_vocabulary, (shape.requests, 1), generator=generator).to(device),
        probability=nans(shape.requests, 1),
        hidden=noise(shape.requests, shape.hidden),
    )
    # Row 0 belongs to padding: what it holds must not matter.
    relay.lengths[0], relay.bonus[0], relay.token[0], relay.hidden[0] = POISON, POISON, POISON, float("nan")
    buffers = CycleBuffers(
        batch=b,
        width=w,
        table=table.to(device),
        control=Control(torch.zeros(4, dtype=torch.int32, device=device), integers(b)),
        draft=DraftInputs(
            own(rows), own(lens), integers(b), integers(b * s), integers(b, 1), nans(b, 1), nans(b, shape.hidden),
            integers(b, s),
        ),
        verify=VerifyInputs(
            own(rows), own(lens), own(tokens), own(positions), own(slots), nans(b * w, shape.vocabulary),
            nans(b * w, shape.packed),
        ),
        extend=ExtendInputs(
            own(rows), own(lens), own(tokens), own(positions), own(slots), nans(b * w, shape.packed),
            *(integers(b, dtype=torch.int32) for _ in range(3)), nans(b * w, shape.draft_vocabulary),
            nans(b * w, shape.hidden),
        ),
        relay=relay,
        results=Results.allocate(b, w, torch.device(device)),
        scratch=Scratch.allocate(b, w, parts, draft_parts, torch.device(device)),
    )  # fmt: skip
    buffers.check()
    return buffers


def choose_rows(shape: Shape, seed: int) -> torch.Tensor:
    """Distinct request rows from 1 on for the live requests."""
    generator = torch.Generator().manual_seed(seed + 77)
    return torch.randperm(shape.requests - 1, generator=generator)[: shape.live] + 1


@dataclass
class Stand:
    """Passes that write what a seed says; drafts agree with the target's choice more often than chance would."""

    buffers: CycleBuffers
    seed: int
    bad: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._generator).to(like)

    def draft(self) -> None:
        b = self.buffers
        self._logits = self._noise(b.verify.logits)
        chosen = self._logits.argmax(-1).view(b.batch, b.width)[:, :-1]
        wrong = torch.rand(chosen.shape, generator=self._generator).to(chosen.device) < 0.3
        b.draft.proposed.copy_(torch.where(wrong, (chosen + 1) % self._logits.shape[1], chosen))

    def verify(self) -> None:
        b = self.buffers
        b.verify.logits.copy_(self._logits)
        for row, value in self.bad:
            b.verify.logits[row % b.verify.logits.shape[0], 5] = value
        b.verify.hidden.copy_(self._noise(b.verify.hidden))

    def extend(self) -> None:
        b = self.buffers
        b.extend.logits.copy_(self._noise(b.extend.logits))
        b.extend.states.copy_(self._noise(b.extend.states))


def duplicate(buffers: CycleBuffers) -> CycleBuffers:
    """A deep copy that keeps which tensors share memory."""
    return copy.deepcopy(buffers)


def tensors(part: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors below a dataclass by dotted name."""
    found: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        name = f"{prefix}{field.name}"
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif dataclasses.is_dataclass(value):
            found |= tensors(value, name + ".")
    return found


def differences(left: CycleBuffers, right: CycleBuffers, ignore: tuple[str, ...] = ()) -> list[str]:
    """Names of tensors that differ in a bit; NaN equals NaN."""
    found = []
    others = tensors(right)
    for name, tensor in tensors(left).items():
        if name.startswith(ignore):
            continue
        if not torch.equal(tensor.cpu().nan_to_num(12345.0), others[name].cpu().nan_to_num(12345.0)):
            found.append(name)
    return found
