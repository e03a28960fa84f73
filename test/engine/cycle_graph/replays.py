"""Thousands of cycles of two programs over equal buffers, compared as they go: for a GPU's graph and for a dry run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cycles
import torch
from sglang.srt.speculative.cycle_graph import program, steps
from sglang.srt.speculative.cycle_graph.buffers import CycleBuffers, Sampling

VOCABULARY = 211
REQUESTS = 41
COMPARED = (
    "relay.lengths", "relay.bonus", "relay.token", "relay.hidden", "verify.tokens", "verify.slots", "extend.tokens",
    "extend.lens", "extend.accepted", "draft.slots", "draft.hidden",
)  # fmt: skip


class Toy:
    """Passes that are small functions of their static inputs, so that a wrong input changes every later cycle."""

    def __init__(self, buffers: CycleBuffers, seed: int) -> None:
        b = self.buffers = buffers
        generator = torch.Generator().manual_seed(seed)
        device = b.table.device

        def noise(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(device)

        vocabulary, drafts = b.verify.logits.shape[1], b.extend.logits.shape[1]
        self.embed = noise(vocabulary, b.verify.hidden.shape[1])
        self.target = noise(vocabulary, vocabulary) * 3
        self.guess = self.target.argmax(dim=1) % drafts

    def draft(self) -> None:
        """See ``program.Passes``."""
        b = self.buffers
        token = (b.draft.token[:, 0] + (b.draft.lens % 3 == 0).long()) % b.extend.logits.shape[1]
        columns = [token]
        for _ in range(b.steps - 1):
            columns.append(self.guess[columns[-1]])
        # A hidden state that was lost on the way would move the first draft.
        shift = (b.draft.hidden[:, 0] > 1.5).long()
        columns[0] = (columns[0] + shift) % b.extend.logits.shape[1]
        b.draft.proposed.copy_(torch.stack(columns, dim=1))

    def verify(self) -> None:
        """See ``program.Passes``."""
        b = self.buffers
        place = (b.verify.positions + b.verify.slots) % 7
        logits = self.target[b.verify.tokens] + place.unsqueeze(1) * 0.01
        b.verify.logits.copy_(logits)
        b.verify.hidden.copy_(self.embed[b.verify.tokens] + b.verify.positions.unsqueeze(1) * 0.001)

    def extend(self) -> None:
        """See ``program.Passes``."""
        b = self.buffers
        size = b.extend.states.shape[1]
        states = b.extend.hidden[:, :size] * 0.5 + b.extend.hidden[:, size : 2 * size]
        b.extend.states.copy_(states)
        best = self.guess[b.extend.tokens % self.guess.shape[0]]
        b.extend.logits.copy_(
            torch.nn.functional.one_hot(best, b.extend.logits.shape[1]).float() + states[:, :1] * 0.0
        )


class Nothing:
    """No passes."""

    def draft(self) -> None:
        """Nothing."""

    def verify(self) -> None:
        """Nothing."""

    def extend(self) -> None:
        """Nothing."""


def make_pair(
    shared: bool, drawn: bool, parts: int, draft_parts: int, device: str
) -> tuple[CycleBuffers, CycleBuffers]:
    """Two equal sets of poisoned buffers; ``drawn``: rows are sampled."""
    shape = cycles.Shape(
        batch=8, live=8, vocabulary=VOCABULARY, draft_vocabulary=VOCABULARY, hidden=64, packed=192,
        requests=REQUESTS, context=4001, shared=shared,
    )  # fmt: skip
    whole = cycles.make(shape, 5, parts, draft_parts, device=device)
    if drawn:
        whole = dataclasses.replace(whole, sampling=Sampling.allocate(shape.batch, torch.device(device)))
    return whole, cycles.duplicate(whole)


def settle(buffers: CycleBuffers) -> None:
    """One cycle without requests or passes: then nothing that a pass looks up is poison any more."""
    device = buffers.table.device
    steps.load(buffers, torch.empty(0, dtype=torch.int64, device=device), 0, 0)
    program.run(buffers, steps, Nothing())


def parameters(live: int, device: torch.device, turn: int) -> Any:
    """Sampling parameters that differ by request and cycle."""
    row = torch.arange(live, device=device)
    return SimpleNamespace(
        temperatures=(0.5 + 0.1 * ((row + turn) % 7)).unsqueeze(1),
        top_ks=torch.where((row + turn) % 3 == 0, 1, torch.where((row + turn) % 3 == 1, 1 << 30, 17)).int(),
        top_ps=torch.where((row + turn) % 2 == 0, 1.0, 0.85),
        min_ps=torch.where((row + turn) % 5 == 0, 0.03, 0.0),
    )


def compare(
    whole: CycleBuffers,
    plain: CycleBuffers,
    launch: Callable[[], None],
    glue: Any,
    count: int,
    *,
    limit_s: float,
    every: int = 97,
) -> int:
    """Run ``count`` cycles on both and compare; returns how many ran before ``limit_s`` seconds were over.

    Args:
        whole: buffers that ``launch`` runs a cycle over.
        plain: buffers that the eager program runs over.
        launch: one cycle over ``whole``.
        glue: loads ``whole``: ``steps`` or ``kernels``.
        count: cycles.
        limit_s: stop after so many seconds.
        every: compare after so many cycles, and after each of the last ones.

    Raises:
        AssertionError: a tensor differs, with cycle and name.
    """
    other = Toy(plain, 1)
    device, drawn = whole.table.device, whole.sampling is not None
    generator = torch.Generator().manual_seed(0)
    begun, kept = time.monotonic(), 0
    for cycle in range(count):
        live = int(torch.randint(1, whole.batch + 1, (1,), generator=generator))
        rows = (torch.randperm(REQUESTS - 1, generator=generator)[:live] + 1).to(device)
        slot = cycle % 4
        for buffers, loader in ((whole, glue), (plain, steps)):
            loader.load(buffers, rows, slot, 0, cycle)
            if drawn:
                loader.load_sampling(buffers, parameters(live, device, cycle))
        launch()
        program.run(plain, steps, other)
        if cycle % 50 == 0:
            # Long requests start anew, as finished ones give their rows to others.
            for relay in (whole.relay, plain.relay):
                relay.lengths.clamp_(max=3000)
        if cycle % every == 0 or cycle > count - 20:
            if device.type == "cuda":
                torch.cuda.synchronize()
            _same(whole, plain, cycle, slot, live)
            kept += int(whole.results.lengths[slot, :live].sum())
            marks = whole.results.marks[slot].tolist()
            assert marks == sorted(marks) and marks[0] > 0
        if time.monotonic() - begun > limit_s:
            return cycle + 1
    assert kept > 0
    return count


def _same(whole: CycleBuffers, plain: CycleBuffers, cycle: int, slot: int, live: int) -> None:
    left, right = cycles.tensors(whole), cycles.tensors(plain)
    for name in COMPARED:
        first = 1 if name.startswith("relay") else 0
        assert torch.equal(left[name][first:], right[name][first:]), (cycle, name)
    width = whole.width
    assert torch.equal(
        whole.results.tokens[slot, : live * width], plain.results.tokens[slot, : live * width]
    ), cycle
    assert torch.equal(whole.results.lengths[slot, :live], plain.results.lengths[slot, :live]), cycle
