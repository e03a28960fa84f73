"""Explicit-state model checker of both protocols: every order in which stores and reads can take effect.

A rank runs ``protocol.steps`` epoch after epoch. What it issues need not happen in that order:

* a pushed word becomes visible at any later time, only in order with this rank's stores to the same word;
* a flag with release becomes visible after everything that the rank stored or read before it, flags of the same
  round excepted (they are set by different threads); without release, at any later time;
* a read takes its value at any time after it is issued, at the latest before the rank's next release, or before
  what is computed from it is pushed; with acquire it is issued after the await, without it before.

* a packet becomes visible whole, at any time after it is issued, only in order with this rank's stores to the same
  word; it is received at any time at which the word holds its epoch, and what is received is the data in it then.

This is weaker than the hardware in two ways that only make the check harder: the end of a kernel orders nothing
where every call has flags, and stores to one peer may pass each other. Where calls are in packets, a call's stores and
reads come after the reads of the calls before it, which is what those calls rely on. Issuing early never loses a behaviour, and flags only grow, so ranks run
ahead to their next unfulfilled await and the only choices left are which pending operation takes effect next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sglang.srt.distributed.one_shot.protocol import SAFE, Kind, Safety, Step, Variant, reached, steps


@dataclass(frozen=True)
class Scenario:
    """What is checked: ranks, one variant an epoch, weakened protections, and faults.

    Attributes:
        lost: (rank, peer, epoch): this flag, or these packets, never arrive.
        dead: (rank, epoch): the rank stops before that epoch.
        late_reads: a release covers earlier stores only, and a read may take its value after it (control).
        words: parts of a message in packets, each waited for by a thread of its own.
    """

    ranks: int
    variants: Sequence[Variant]
    safety: Safety = SAFE
    lost: tuple[int, int, int] | None = None
    dead: tuple[int, int] | None = None
    late_reads: bool = False
    words: int = 1

    @cached_property
    def programs(self) -> tuple[tuple[Step, ...], ...]:
        """Steps of every rank over all epochs, in the order in which they are issued."""
        everyone = range(self.ranks)
        result = []
        for rank in everyone:
            program: list[Step] = []
            for epoch, variant in enumerate(self.variants, 1):
                if self.dead is not None and self.dead == (rank, epoch):
                    break
                listed = list(steps(rank, everyone, epoch, variant, self.safety, self.words))
                if not self.safety.whole:  # a store of the epoch beside that of the data
                    listed += [
                        replace(step, kind=Kind.PUBLISH)
                        for step in listed
                        if step.packets and step.kind is Kind.PUSH
                    ]
                if not self.safety.acquire:
                    listed.sort(key=lambda step: (step.stage, step.kind is Kind.AWAIT))
                program += listed
            result.append(tuple(program))
        return tuple(result)


@dataclass
class Result:
    """Outcome: number of states, and the shortest way to the first thing that went wrong, if any.

    Attributes:
        wrong: a sentence about the read that saw another epoch's data; "" if there is none.
        stuck: (rank, peer, epoch, stage) of the awaits that no order of events can fulfil.
    """

    states: int = 0
    wrong: str = ""
    stuck: set[tuple[int, int, int, int]] = field(default_factory=set)
    trace: list[str] = field(default_factory=list)


# A pending operation: (position in the program, step). Memory: epoch by (what, owner, source, stage, buffer, word).
SLOT, FLAG, DATA, EPOCH = range(4)
Pending = tuple[int, ...]
State = tuple[tuple[int, ...], tuple[Pending, ...], tuple[int, ...]]


class Checker:
    """Breadth-first search over one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.programs = scenario, scenario.programs
        self._cells: dict[tuple[int, ...], int] = {}
        kernels = scenario.safety.kernel_order and Variant.PACKETS in scenario.variants
        self._ordered_kernels = kernels
        self._blockers = [
            [self._blocking(program, at) for at in range(len(program))] for program in self.programs
        ]

    def _cell(self, what: int, owner: int, source: int, step: Step) -> int:
        key = (what, owner, source, step.stage, 0 if what == FLAG else step.buffer, step.word)
        return self._cells.setdefault(key, len(self._cells))

    def _written(self, rank: int, step: Step) -> tuple[int, ...]:
        """Cells that a store of ``rank`` sets."""
        if not step.packets:
            whats: tuple[int, ...] = (FLAG,) if step.kind is Kind.PUBLISH else (SLOT,)
        elif self.scenario.safety.whole:
            whats = (DATA, EPOCH)
        else:
            whats = (EPOCH,) if step.kind is Kind.PUBLISH else (DATA,)
        return tuple(self._cell(what, step.peer, rank, step) for what in whats)

    def _blocking(self, program: Sequence[Step], at: int) -> frozenset[int]:
        """Earlier operations that must have taken effect before operation ``at`` may."""
        step, earlier = program[at], range(at)
        reads: frozenset[int] = frozenset()
        if self._ordered_kernels:
            reads = frozenset(
                k
                for k in earlier
                if program[k].kind in (Kind.READ, Kind.RECEIVE) and program[k].epoch < step.epoch
            )
        if step.packets:
            if step.kind is Kind.RECEIVE:
                return reads
            return reads | frozenset(
                k
                for k in earlier
                if program[k].packets
                and program[k].kind is step.kind
                and (program[k].peer, program[k].buffer, program[k].word)
                == (step.peer, step.buffer, step.word)
            )
        return reads | self._blocking_flags(program, at)

    def _blocking_flags(self, program: Sequence[Step], at: int) -> frozenset[int]:
        step, earlier = program[at], [k for k in range(at) if not program[k].packets]
        if step.kind is Kind.PUBLISH and self.scenario.safety.release:
            return frozenset(
                k
                for k in earlier
                if (
                    program[k].kind is not Kind.PUBLISH
                    or (program[k].epoch, program[k].stage) != (step.epoch, step.stage)
                )
                and not (self.scenario.late_reads and program[k].kind is Kind.READ)
            )
        if step.kind in (Kind.PUSH, Kind.PUBLISH):
            same = {
                k
                for k in earlier
                if program[k].kind is step.kind
                and (program[k].peer, program[k].stage) == (step.peer, step.stage)
                and (step.kind is Kind.PUBLISH or program[k].buffer == step.buffer)
            }
            computed_from = {
                k
                for k in earlier
                if program[k].kind is Kind.READ
                and program[k].epoch == step.epoch
                and program[k].stage < step.stage
            }
            return frozenset(same | computed_from)
        return frozenset()

    def run(self, limit: int = 5_000_000) -> Result:
        """Search until something is wrong or all states are seen.

        Raises:
            MemoryError: more than ``limit`` states.
        """
        result = Result()
        for rank, program in enumerate(
            self.programs
        ):  # number all cells first: a state is then a plain tuple
            for step in program:
                if step.kind in (Kind.PUSH, Kind.PUBLISH):
                    self._written(rank, step)
                for what in self._read(step):
                    self._cell(what, rank, step.peer, step)
        start = self._advance(
            ((0,) * len(self.programs), ((),) * len(self.programs), (0,) * len(self._cells))
        )
        parents: dict[State, tuple[State, str] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            moved = False
            for rank, pending in enumerate(state[1]):
                waiting = set(pending)
                for at in pending:
                    if waiting & self._blockers[rank][at] or not self._arrived(state, rank, at):
                        continue
                    moved = True
                    wrong, following = self._happen(state, rank, at)
                    if wrong:
                        result.wrong, result.states = wrong, len(parents)
                        result.trace = [*self._trace(parents, state), wrong]
                        return result
                    if following not in parents:
                        parents[following] = (state, self._words(rank, at))
                        queue.append(following)
                        if len(parents) > limit:
                            raise MemoryError(f"more than {limit} states")
            if not moved:
                for rank, pending in enumerate(state[1]):
                    for step in (self.programs[rank][at] for at in pending):
                        if step.kind is Kind.RECEIVE:
                            result.stuck.add((rank, step.peer, step.epoch, step.stage))
                for rank, counter in enumerate(state[0]):
                    if counter < len(self.programs[rank]):
                        step = self.programs[rank][counter]
                        result.stuck.add((rank, step.peer, step.epoch, step.stage))
        result.states = len(parents)
        return result

    @staticmethod
    def _read(step: Step) -> tuple[int, ...]:
        """What a step looks at, the data first."""
        return {
            Kind.AWAIT: (FLAG,),
            Kind.READ: (SLOT,),
            Kind.RECEIVE: (DATA, EPOCH),
        }.get(step.kind, ())

    def _arrived(self, state: State, rank: int, at: int) -> bool:
        """Whether a packet can be received; every other operation can take effect at any time."""
        step = self.programs[rank][at]
        if step.kind is not Kind.RECEIVE:
            return True
        seen = state[2][self._cell(EPOCH, rank, step.peer, step)]
        return seen == step.epoch if self.scenario.safety.own_epoch else seen != 0

    def _happen(self, state: State, rank: int, at: int) -> tuple[str, State]:
        counters, pending, memory = state
        step = self.programs[rank][at]
        rest = tuple(k for k in pending[rank] if k != at)
        pending = (*pending[:rank], rest, *pending[rank + 1 :])
        if step.kind in (Kind.READ, Kind.RECEIVE):
            seen = memory[self._cell(self._read(step)[0], rank, step.peer, step)]
            if seen != step.epoch:
                return (
                    f"rank {rank}, epoch {step.epoch}, stage {step.stage}: the slot of rank {step.peer} holds "
                    f"epoch {seen}",
                    state,
                )
        else:
            for cell in self._written(rank, step):
                memory = (*memory[:cell], step.epoch, *memory[cell + 1 :])
        return "", self._advance((counters, pending, memory))

    def _advance(self, state: State) -> State:
        """Every rank issues what it can: up to its next await that is not fulfilled."""
        memory = state[2]
        counters, pending = list(state[0]), list(state[1])
        for rank, program in enumerate(self.programs):
            at, added = counters[rank], list(pending[rank])
            while at < len(program):
                step = program[at]
                if step.kind is Kind.AWAIT:
                    flag = memory[self._cell(FLAG, rank, step.peer, step)]
                    if not reached(flag, step.epoch, self.scenario.safety.flag_bits):
                        break
                elif not (
                    (step.kind is Kind.PUBLISH or (step.packets and step.kind is Kind.PUSH))
                    and self.scenario.lost == (rank, step.peer, step.epoch)
                ):
                    added.append(at)
                at += 1
            counters[rank], pending[rank] = at, tuple(added)
        return tuple(counters), tuple(pending), memory

    def _words(self, rank: int, at: int) -> str:
        step = self.programs[rank][at]
        return f"rank {rank} {step.kind.value} (peer {step.peer}, stage {step.stage}, epoch {step.epoch})"

    @staticmethod
    def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        lines = []
        while (before := parents[state]) is not None:
            state, words = before
            lines.append(words)
        return lines[::-1]


def check(scenario: Scenario, limit: int = 5_000_000) -> Result:
    """Explore ``scenario`` completely, or up to its first fault."""
    return Checker(scenario).run(limit)
