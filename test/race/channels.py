"""Calls in packets over several channels: every order in which two ranks' stores and polls can take effect.

``model.py`` checks one channel in every epoch. Here calls differ in shape: a channel may have no part in a call, or
a part without data (its counter moves on, nothing is exchanged), so that the counters of channels, and with them the
buffers in use, differ. What is asked: does each call end, on each rank, with the packets of that call?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.distributed.one_shot.protocol import Kind, Safety, Step, Variant, steps

RANKS = 2
#: Of one call, by channel: True exchanges data, False only counts; a channel that is not named has no part.
Shape = dict[int, bool]


@dataclass(frozen=True)
class Operation:
    """A store or a poll of one rank: of which call, on which channel."""

    call: int
    channel: int
    step: Step

    @property
    def cell(self) -> tuple[int, int]:
        """The slot, among those from one rank to the other."""
        return self.channel, self.step.buffer


def program(rank: int, shapes: Sequence[Shape], safety: Safety, drift: int | None = None) -> list[Operation]:
    """What a rank does. ``drift``: a call at which rank 0 does not move its counters on (control)."""
    epochs: dict[int, int] = {}
    found = []
    for number, shape in enumerate(shapes):
        for channel, data in shape.items():
            epoch = epochs.get(channel, 0) + 1
            if not (rank == 0 and drift == number):
                epochs[channel] = epoch
            if data:
                listed = steps(rank, range(RANKS), epoch, Variant.PACKETS, safety)
                found += [Operation(number, channel, step) for step in listed]
    return found


def stuck(shapes: Sequence[Shape], safety: Safety, drift: int | None = None) -> str:
    """The first state from which calls never end, in words; "" if there is none in any order."""
    programs = [program(rank, shapes, safety, drift) for rank in range(RANKS)]
    start = (frozenset[int](), frozenset[int]()), frozenset[tuple[int, tuple[int, int], int]]()
    seen, ahead = {start}, [start]
    while ahead:
        done, slots = ahead.pop()
        moved = False
        held = {(owner, cell): epoch for owner, cell, epoch in slots}
        for rank, operations in enumerate(programs):
            open_calls = [op.call for at, op in enumerate(operations) if at not in done[rank]]
            for at, op in enumerate(operations):
                if at in done[rank] or (safety.kernel_order and op.call > open_calls[0]):
                    continue
                if op.step.kind is Kind.PUSH:
                    if any(k not in done[rank] for k in range(at) if _same(operations[k], op)):
                        continue
                    following = {**held, (1 - rank, op.cell): op.step.epoch}
                elif held.get((rank, op.cell)) == op.step.epoch:
                    following = held
                else:
                    continue
                moved = True
                after = tuple(done[r] | {at} if r == rank else done[r] for r in range(RANKS))
                state = (
                    (after[0], after[1]),
                    frozenset((owner, cell, epoch) for (owner, cell), epoch in following.items()),
                )
                if state not in seen:
                    seen.add(state)
                    ahead.append(state)
        if not moved and any(len(done[rank]) < len(programs[rank]) for rank in range(RANKS)):
            left = [
                f"rank {rank}, call {op.call}, channel {op.channel}: epoch {op.step.epoch}, the slot holds "
                f"{held.get((rank, op.cell), 0)}"
                for rank, operations in enumerate(programs)
                for at, op in enumerate(operations)
                if at not in done[rank] and op.step.kind is Kind.RECEIVE
            ]
            return left[0]
    return ""


def _same(one: Operation, other: Operation) -> bool:
    return one.step.kind is other.step.kind and one.cell == other.cell
