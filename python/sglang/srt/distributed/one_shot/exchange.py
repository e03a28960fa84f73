"""How ranks tell each other small things at start with a time limit, and come to one view of the answers.

A plain all-gather has neither: a rank that is late sees all the others and goes on, while they have given up on it,
and the next collective hangs. Here rank 0 alone closes each round, and everybody acts on what it published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

#: How much longer than rank 0's own limit the others wait for its word.
GRACE_S = 20.0


class Store(Protocol):
    """The part of ``torch.distributed.Store`` used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class Silent(RuntimeError):
    """Ranks that did not answer in time; ``ranks`` are positions in the group."""

    def __init__(self, ranks: Sequence[int], label: str, limit_s: float) -> None:
        self.ranks, self.label, self.limit_s = tuple(ranks), label, limit_s
        who = ", ".join(f"rank {rank}" for rank in ranks)
        super().__init__(f"{who} did not answer within {limit_s:.0f} s ({label})")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.ranks, self.label, self.limit_s)


class Exchange:
    """Rounds of small JSON values among the ranks of one group.

    Args:
        store: a store that all ranks reach (that of the default process group).
        rank: position of this rank in the group.
        size: ranks of the group.
        scope: a name that this group has alone; two exchanges of one scope would read each other's rounds.
    """

    def __init__(self, store: Store, rank: int, size: int, scope: str) -> None:
        self.rank, self.size = rank, size
        self._store, self._scope, self._round = store, scope, 0

    def gather(self, label: str, value: Any, limit_s: float) -> list[Any]:
        """Every rank's value in the order of ranks; None for a rank that was silent when rank 0 closed the round.

        Args:
            label: what is asked, for the error.
            value: anything JSON holds, but not None.
            limit_s: how long rank 0 waits for all of them together.

        Raises:
            Silent: rank 0 did not close the round within ``limit_s`` and a grace: there is no common view, and
                the caller must not go on.
        """
        self._round += 1
        base = f"one-shot/{self._scope}/{self._round}"
        self._store.set(f"{base}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            self._store.set(f"{base}/closed", json.dumps(self._collect(base, limit_s)))
        try:
            self._store.wait([f"{base}/closed"], timedelta(seconds=limit_s + GRACE_S))
            answers: list[Any] = json.loads(self._store.get(f"{base}/closed"))
        except Exception as error:
            raise Silent([0], label, limit_s + GRACE_S) from error
        return answers

    def _collect(self, base: str, limit_s: float) -> list[Any]:
        deadline = time.monotonic() + limit_s
        answers: list[Any] = []
        for rank in range(self.size):
            # A rank that has answered is read without waiting even after the deadline: only silence is punished.
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self._store.wait([f"{base}/{rank}"], timedelta(seconds=left))
                answers.append(json.loads(self._store.get(f"{base}/{rank}")))
            except Exception:
                answers.append(None)
        return answers

    def require(self, label: str, value: Any, limit_s: float) -> list[Any]:
        """``gather``, but a silent rank is an error on every rank.

        Raises:
            Silent: naming the ranks that did not answer.
        """
        answers = self.gather(label, value, limit_s)
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        if silent:
            raise Silent(silent, label, limit_s)
        return answers
