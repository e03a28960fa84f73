"""Why a pass runs without its graph: facts in, reason out.

The facts are those that upstream's graph runners ask about a batch, in the order in which they ask, so that the
first one that fails is the reason. A reason holds no number that changes from step to step, because it becomes a
label of a metric; the numbers and the remedy are its detail.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLAYED = "replayed"

OFF = "switched off by --speculative-verify-graph off"
NOT_CAPTURED = "no graph was captured"
OWN_EMBEDDINGS = "a request brings its own embeddings"
RAGGED_BACKEND = "the attention backend has no graphs for ragged verify"
RAGGED_SIZE = "the ragged batch is above the largest captured one"
RAGGED_LAYOUT = "the batch has no ragged layout"
HIDDEN_STATES = "more hidden states are asked for than were captured"
WIDTH = "tokens a request differ from the captured ones"
SIZE = "the batch is above the largest captured one"
SIZE_OF_RANKS = "the batch of another rank is above the largest captured one"
NOT_A_SIZE = "this batch size was not captured and padding is off"
RANKS = "another rank cannot replay in this step"
ENCODER = "a request has no encoder tokens"
TWO_BATCH = "the batch cannot be split for two-batch overlap"
TOKENS = "the batch does not bring the captured number of tokens"
UNKNOWN = "the batch needs what the graph does not hold"


@dataclass(frozen=True)
class Eager:
    """A pass that runs without a graph.

    Attributes:
        reason: why, without changing numbers.
        detail: the numbers and the flag to change; may be empty.
    """

    reason: str
    detail: str = ""

    def text(self) -> str:
        """Reason and detail in one line."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True)
class Ragged:
    """A verify batch whose requests differ in width.

    Attributes:
        layout: whether the batch brings the layout that the graphs need.
        backend: whether the attention backend captures such batches.
        tokens: tokens of the batch, padded to a captured size.
        largest: largest captured number of tokens.
        slots: requests that the graph of ``tokens`` holds.
    """

    layout: bool = True
    backend: bool = True
    tokens: int = 0
    largest: int = 0
    slots: int = 0


@dataclass(frozen=True)
class Facts:
    """What decides whether a batch replays.

    Attributes:
        batch: requests of this rank.
        sizes: captured batch sizes, ascending; empty when nothing was captured.
        absent: why nothing was captured, in words; only read when ``sizes`` is empty.
        switched_off: ``--speculative-verify-graph off``.
        padding: whether a batch may be padded up to the next captured size.
        width: tokens a request that the batch states; 0 when it states none.
        captured_width: tokens a request that were captured.
        of_ranks: largest batch over all data-parallel ranks, where they must agree; None where each decides alone.
        own_embeddings: a request replaces token embeddings.
        ragged: facts of a ragged verify; None for batches of one width.
        hidden_fits: whether the captured graphs return the hidden states that are asked for (ragged only: elsewhere
            upstream raises).
        ranks_ready: whether every rank can replay; None where no agreement is needed.
        encoder: whether every request has encoder tokens; None for decoder-only models.
        two_batch: whether the batch can be split for two-batch overlap; None when that is off.
        tokens: tokens of the batch where they are checked (n-gram drafts); None elsewhere.
    """

    batch: int
    sizes: tuple[int, ...]
    captured_width: int
    absent: str = ""
    switched_off: bool = False
    padding: bool = True
    width: int = 0
    of_ranks: int | None = None
    own_embeddings: bool = False
    ragged: Ragged | None = None
    hidden_fits: bool = True
    ranks_ready: bool | None = None
    encoder: bool | None = None
    two_batch: bool | None = None
    tokens: int | None = None


def why_eager(facts: Facts) -> Eager | None:
    """The first reason for which this batch cannot replay; None when it can."""
    if facts.switched_off:
        return Eager(OFF)
    if not facts.sizes:
        return Eager(NOT_CAPTURED, facts.absent)
    if facts.own_embeddings:
        return Eager(OWN_EMBEDDINGS)
    if facts.ragged is not None:
        return _why_not_ragged(facts, facts.ragged)
    if facts.width > 0 and facts.width != facts.captured_width:
        return Eager(WIDTH, f"{facts.width} tokens, captured {facts.captured_width}")
    return _why_not_size(facts) or _why_not_content(facts)


def _why_not_ragged(facts: Facts, ragged: Ragged) -> Eager | None:
    if not ragged.layout:
        return Eager(RAGGED_LAYOUT)
    if not ragged.backend:
        return Eager(RAGGED_BACKEND)
    if ragged.tokens > ragged.largest or facts.batch > ragged.slots:
        return Eager(
            RAGGED_SIZE,
            f"{facts.batch} requests of {ragged.tokens} tokens, largest {ragged.slots} of {ragged.largest}; "
            f"raise --cuda-graph-max-bs-decode",
        )
    if facts.ranks_ready is False:
        return Eager(RANKS)
    if facts.encoder is False:
        return Eager(ENCODER)
    return None if facts.hidden_fits else Eager(HIDDEN_STATES)


def _why_not_size(facts: Facts) -> Eager | None:
    asked = facts.batch if facts.of_ranks is None else facts.of_ranks
    if facts.padding:
        largest = facts.sizes[-1]
        if asked > largest:
            return Eager(
                SIZE if asked == facts.batch else SIZE_OF_RANKS,
                f"batch {asked}, largest {largest}; raise --cuda-graph-max-bs-decode or lower --max-running-requests",
            )
    elif asked not in facts.sizes:
        return Eager(NOT_A_SIZE, f"batch {asked}; list it in --cuda-graph-bs-decode")
    return None


def _why_not_content(facts: Facts) -> Eager | None:
    if facts.ranks_ready is False:
        return Eager(RANKS, "a data-parallel rank prefills or idles; it replays again when all decode")
    if facts.encoder is False:
        return Eager(ENCODER)
    if facts.two_batch is False:
        return Eager(TWO_BATCH)
    if facts.tokens is not None and facts.tokens != facts.batch * facts.captured_width:
        return Eager(TOKENS, f"{facts.tokens} tokens, captured {facts.batch * facts.captured_width}")
    return None
