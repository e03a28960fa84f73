"""The two protocols of the one-shot all-reduce, as data: what each rank does, in which order, with which orderings.

One definition serves three readers: the CUDA kernels implement it (``csrc/``), the simulated peers execute it, and
the model checker in ``test/race`` explores every interleaving of it. The weakening switches of :class:`Safety` exist
for negative controls only.

A *channel* is one independent instance of the protocol: a CTA of the kernel and the CTAs with the same index on
the other ranks. It has its own epoch counter, its own slots and its own flags, so channels never order one another.

One epoch of a channel at rank ``r`` (members ``M``, the peers are ``M`` without ``r``)::

    for stage in stages:
        push     my part into slot [buffer][stage][r] of every peer     plain 16-byte stores
        publish  flag [stage][r] := epoch at every peer                  st.release.sys
        await    my flag [stage][p] >= epoch for every peer p            ld.acquire.sys
        read     my slots [buffer][stage][p], add in the order of ranks  plain loads

with ``epoch`` = the channel's counter + 1 and ``buffer`` = ``epoch`` modulo the number of buffers. No flag and no
slot is ever reset.

**Why two buffers are enough and no end barrier is needed.** Only rank ``p`` reads ``p``'s slots, and ``r``
overwrites what it pushed in epoch ``e`` when it pushes epoch ``e + 2``. It gets there only after awaiting ``p``'s
flag of epoch ``e + 1``, which ``p`` publishes after its reads of epoch ``e``: in program order, and the release
covers earlier reads. With one buffer the push of ``e + 1`` may meet those reads: nothing that ``r`` awaited says
that ``p`` has finished ``e``.

**Packets** (:attr:`Variant.PACKETS`) have no flags. Data travels in words of 16 bytes, 8 of data and 8 of epoch, each
written by one store and read by one load::

    push     my part as packets of this epoch into slot [buffer][r] of every peer     strong 16-byte stores
    receive  each packet of slot [buffer][p] until its epoch is this one              strong 16-byte loads

A packet holds its data if it holds its epoch, so nothing is ordered behind anything within a call, and a thread waits
for the packets of its own elements only. **Two buffers are enough here too, by the order of kernels**: a call begins
after the one before it has ended. ``r`` ends call ``n`` with a packet of every peer's call ``n``, so every peer has
begun call ``n`` and ended call ``n - 1``. In call ``n + 1`` it overwrites what was last used two epochs of that channel
before, in call ``n - 1`` at the latest, which every peer has read. It does not matter which channels a call uses, nor
that calls with flags lie in between: they too end with something of every peer's same call. A reader asks for its own
epoch, not for one that is at least as new: what a slot holds is taken or waited out, never taken for something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a step does."""

    PUSH = "push"
    PUBLISH = "publish"
    AWAIT = "await"
    READ = "read"
    RECEIVE = "receive"


class Variant(Enum):
    """How the reduction is spread over the ranks.

    ONE_SHOT: every rank sends all rows to every peer and sums everything itself; (n - 1) x payload leaves a rank.
    TWO_STAGE: reduce-scatter, then all-gather, both by push; 2 (n - 1) / n x payload leaves a rank, two hops.
    PACKETS: one-shot in packets: 2 (n - 1) x payload leaves a rank, and nothing is waited for but the data.
    """

    ONE_SHOT = "one_shot"
    TWO_STAGE = "two_stage"
    PACKETS = "packets"

    @property
    def stages(self) -> int:
        """Number of push / publish / await / read rounds in one epoch."""
        return 2 if self is Variant.TWO_STAGE else 1


@dataclass(frozen=True)
class Safety:
    """Which protections are on; anything but the defaults is for negative controls.

    Attributes:
        buffers: copies of every slot, used in turn.
        release: a flag may not become visible before the data pushed, nor before the reads done, ahead of it.
        acquire: a slot may not be read before the flag that was awaited for it.
        data_first: data is pushed before its flag is published.
        flag_bits: width of flags and counters. A flag of the second stage may be as old as the last two-stage call;
            with 32 bits, one-shot calls of two days make such a flag look like one of the future.
        whole: a packet's data and epoch are one store; without, the epoch may become visible before its data.
        own_epoch: a packet is taken for its own epoch only; without, for any that a call has left.
        kernel_order: a call that follows packets, or is in packets, begins after the one before it has ended.
    """

    buffers: int = 2
    release: bool = True
    acquire: bool = True
    data_first: bool = True
    flag_bits: int = 64
    whole: bool = True
    own_epoch: bool = True
    kernel_order: bool = True


SAFE = Safety()


@dataclass(frozen=True)
class Step:
    """One step of one rank; ``peer`` is where it writes to, or whose contribution it waits for or reads.

    ``word`` counts the parts of a message that are waited for apart, in packets; 0 elsewhere.
    """

    kind: Kind
    peer: int
    stage: int
    epoch: int
    buffer: int
    word: int = 0
    packets: bool = False


def reached(flag: int, epoch: int, bits: int = SAFE.flag_bits) -> bool:
    """Whether a flag has reached ``epoch``, both counted modulo 2**bits; a flag 2**(bits-1) behind looks ahead."""
    return (flag - epoch) % (1 << bits) < 1 << (bits - 1)


def peers_of(rank: int, members: Sequence[int]) -> tuple[int, ...]:
    """The other members in the order in which a rank addresses them: its successors first.

    Ranks start with different peers, so that the first stores of all of them do not meet at one link.

    Raises:
        ValueError: ``rank`` is not a member, or there are fewer than two members.
    """
    ordered = sorted(members)
    if rank not in ordered or len(ordered) < 2 or len(set(ordered)) != len(ordered):
        raise ValueError(f"rank {rank} cannot reduce among members {list(members)}")
    at = ordered.index(rank)
    return tuple(ordered[at + 1 :] + ordered[:at])


def steps(
    rank: int,
    members: Sequence[int],
    epoch: int,
    variant: Variant = Variant.ONE_SHOT,
    safety: Safety = SAFE,
    words: int = 1,
) -> Iterator[Step]:
    """The steps of one epoch in program order.

    Args:
        rank: who executes them.
        members: ranks that take part, this one included.
        epoch: 1 for the first use of a channel.
        variant: one or two rounds.
        safety: weakened for negative controls.
        words: parts of a message in packets; no order holds between them.
    """
    peers = peers_of(rank, members)
    buffer = epoch % safety.buffers
    if variant is Variant.PACKETS:
        for kind in (Kind.PUSH, Kind.RECEIVE):
            for word in range(words):
                for peer in peers:
                    yield Step(kind, peer, 0, epoch, buffer, word, packets=True)
        return
    for stage in range(variant.stages):
        first, second = (Kind.PUSH, Kind.PUBLISH) if safety.data_first else (Kind.PUBLISH, Kind.PUSH)
        for kind in (first, second, Kind.AWAIT, Kind.READ):
            for peer in peers:
                yield Step(kind, peer, stage, epoch, buffer)
