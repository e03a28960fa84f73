"""What patched upstream functions call for the switch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.auto import failure, plain
from sglang.srt.speculative.auto.cells import PLAIN
from sglang.srt.speculative.auto.runtime import ATTRIBUTE, OWED, runtime_of
from sglang.srt.speculative.auto.start import start

logger = logging.getLogger("sglang.fork.auto")
Original = Callable[..., Any]

REASON = "fork_auto_reason"
# The result being settled is a plain one: set and read within one call of the result processor.
_settling_plain = False


def graphs_ready(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the worker's capture of graphs: the switch needs the target's graphs and pools, so it is made here."""
    done = original(self, *args, **kwargs)
    runtime, reason = start(self)
    setattr(self, ATTRIBUTE, runtime)
    setattr(self, REASON, reason)
    if self.target_worker.model_runner.ps.tp_rank == 0:
        if runtime is None:
            logger.info("speculation stays on: %s", reason)
        else:
            logger.info(
                "speculation gives way to plain decode where it loses (rows kept for the draft: %d a request, %.0f MB)",
                runtime.ring.span,
                runtime.ring.bytes / 1e6,
            )
    return done


def step(original: Original, self: Any, batch: Any, on_publish: Any = None, **kwargs: Any) -> Any:
    """Around the worker's step, outermost: a prefill, a cycle or a plain step."""
    runtime = runtime_of(self)
    if runtime is None:
        return original(self, batch, on_publish=on_publish, **kwargs)
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        runtime.cut()
        result = original(self, batch, on_publish=on_publish, **kwargs)
        runtime.after_prefill(batch, result)
        return result
    if batch.forward_mode.is_idle() or batch.spec_info is None:
        runtime.cut()
        return original(self, batch, on_publish=on_publish, **kwargs)
    if runtime.choose(batch) == PLAIN:
        runtime.before_plain(batch, on_publish)
        kept = {name: getattr(batch, name) for name in plain.CHANGED}
        try:
            return timed_plain(self, runtime, batch, on_publish)
        except (
            AttributeError,
            TypeError,
            ValueError,
            KeyError,
            AssertionError,
            NotImplementedError,
        ) as error:
            # A step that cannot be launched must not end the server: the request goes on as a cycle, and stays so. Of
            # several ranks all do, or the error ends this one and with it the server.
            logger.exception(
                "a plain step failed; speculation stays on from here, if it failed on every rank"
            )
            failure.agree(error, runtime.exchange(), runtime.plain_begun)
            for name, value in kept.items():
                setattr(batch, name, value)
            runtime.give_up(batch, f"a plain step failed: {type(error).__name__}")
    runtime.before_cycle(batch, on_publish)
    return original(self, batch, on_publish=on_publish, **kwargs)


def timed_plain(worker: Any, runtime: Any, batch: Any, on_publish: Any) -> Any:
    """A plain step, timed for the statistics as a decode: so a speculating server fills its own baseline."""
    from sglang.fork.topics import enabled

    if not enabled("verify-stats"):
        return plain.step(worker, runtime, batch, on_publish)
    from sglang.srt.speculative.stats.collector import collector

    stats = collector()
    stats.clock.begin("decode", kind="decode", batch=len(batch.reqs), context=runtime.context)
    stats.graphs.begin()
    try:
        result = plain.step(worker, runtime, batch, on_publish)
    except BaseException:
        stats.clock.abandon()
        raise
    stats.clock.end()
    stats.read()
    if stats.device != "cpu":
        stats.graphs.end(("decode",))
    return result


def resolve_tokens(original: Original, self: Any, result: Any, batch: Any) -> Any:
    """Around the resolver of a step's tokens: a plain step is no verify, and counts as none."""
    global _settling_plain
    _settling_plain = bool(getattr(result, plain.MARK, False))
    if _settling_plain:
        return plain.settle(result, batch.reqs)
    tokens = original(self, result, batch)
    runtime = runtime_of(self.model_worker)
    if runtime is not None:
        runtime.settled(result)
    return tokens


def spec_metrics(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the reporter's counts of verifies: plain steps are left out."""
    return None if _settling_plain else original(self, *args, **kwargs)


def decode_stats(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the reporter's periodic line: an interval without a verify is told as plain decode is.

    Upstream divides by the verifies of the interval, and plain steps are none: the scheduler would die of it.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    scheduler = self.scheduler
    kept = scheduler.spec_algorithm
    if self.spec_num_forward_ct or kept.is_none():
        return original(self, *args, **kwargs)
    scheduler.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        return original(self, *args, **kwargs)
    finally:
        scheduler.spec_algorithm = kept


def committed(original: Original, self: Any) -> Any:
    """Around the length whose KV a request leaves behind: rows that the draft never wrote are not left to others.

    What a finished request leaves in the prefix cache serves the target and the draft of whoever comes next, under
    the same slots. The rows still owed are released with the spare ones instead. What the cache has already is never
    released here: a request that came back from a retraction was prefilled with its output, and under overlap a row is
    owed before its step counts as committed. One token beyond it, since a key of the cache is a pair of tokens there: of
    a length n it keeps n - 1 slots and releases the last.
    """
    length = original(self)
    owed = int(getattr(self, OWED, 0))
    if not owed:
        return length
    return max(min(length, max(len(self.origin_input_ids), int(self.cache_protected_len) + 1)), length - owed)


def internal_state(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the scheduler's internal state: adds ``speculative_auto``."""
    output = original(self, *args, **kwargs)
    worker = getattr(self, "draft_worker", None)
    runtime = runtime_of(worker)
    output.internal_state["speculative_auto"] = (
        {"mode": "off", "reason": getattr(worker, REASON, None)} if runtime is None else runtime.state()
    )
    return output
