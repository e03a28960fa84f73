"""What patched upstream methods call: each runs the original and adds a mark or a count.

Arguments are upstream's and are passed on as they come; only what is read is named. A hook must never
change what the original returns, and never raise on its own account.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.auto.plain import MARK as PLAIN_STEP
from sglang.srt.speculative.stats import export, ranks
from sglang.srt.speculative.stats.accept import kept_tokens
from sglang.srt.speculative.stats.collector import Collector, collector, line
from sglang.srt.speculative.stats.graphs import CYCLE_PASSES, name_of, why_not

logger = logging.getLogger(__name__)
Original = Callable[..., Any]

# Key under which a request's summary travels to the process that builds the answer.
SUMMARY_KEY = "spec_cycle"


def cycle(original: Original, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the speculative worker's step: a prefill, or one cycle."""
    stats = collector(_device(self))
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        stats.clock.cut()
        return original(self, batch, *args, **kwargs)
    stats.clock.begin("draft", batch=_size(batch), context=_context(batch))
    stats.graphs.begin()
    try:
        result = original(self, batch, *args, **kwargs)
    except BaseException:
        stats.clock.abandon()
        raise
    stats.clock.end()
    _end_of_step(stats, CYCLE_PASSES)
    return result


def verify(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the worker's verify: the draft ends here."""
    collector().clock.mark("verify")
    return original(self, *args, **kwargs)


def sample(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Around accept and sample: the verify forward ends here."""
    collector().clock.mark("sample")
    return original(*args, **kwargs)


def draft_extend(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the draft extend of a decode step: accept and publish end here."""
    collector().clock.mark("draft_extend")
    return original(self, *args, **kwargs)


def plain(original: Original, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the target worker's step: times plain decodes of a server that does not speculate."""
    if batch is None or not batch.spec_algorithm.is_none():
        return original(self, batch, *args, **kwargs)
    stats = collector(_device(self))
    if not batch.forward_mode.is_decode():
        stats.clock.cut()
        return original(self, batch, *args, **kwargs)
    stats.clock.begin("decode", kind="decode", batch=_size(batch), context=_context(batch))
    stats.graphs.begin()
    try:
        result = original(self, batch, *args, **kwargs)
    except BaseException:
        stats.clock.abandon()
        raise
    stats.clock.end()
    _end_of_step(stats, ("decode",))
    return result


def replayed(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the replay of a graph runner."""
    collector().graphs.replay(name_of(self))
    return original(self, *args, **kwargs)


def may_replay(original: Original, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a graph runner's check of a batch: notes why it refuses one."""
    allowed = original(self, forward_batch, *args, **kwargs)
    if not allowed:
        collector().graphs.refuse(name_of(self), *why_not(self, forward_batch))
    return allowed


def settled(
    original: Original, self: Any, req: Any, batch: Any, result: Any, i: int, *args: Any, **kwargs: Any
) -> Any:
    """Around the handling of a request whose finish state is known: count what it keeps of this verify."""
    if not batch.spec_algorithm.is_none() and result.num_correct_drafts_per_req_cpu is not None:
        stats = collector()
        if getattr(result, PLAIN_STEP, False):
            _settle_plain(stats, req)
            return original(self, req, batch, result, i, *args, **kwargs)
        accepted = result.num_correct_drafts_per_req_cpu[i] + 1
        retained = getattr(result, "grammar_retained_tokens", None)
        run = len(retained[i]) if retained and retained[i] is not None else accepted
        kept = kept_tokens(run, len(req.output_ids) - run, req.finished_len if req.finished() else None)
        stats.settle(kept)
        if kept < accepted:
            stats.tokens_past_end += accepted - kept
            _take_back(self, req, result, i, accepted, kept)
        export.follow(stats, req)
        if req.finished():
            export.attach_summary(stats, req, SUMMARY_KEY)
    return original(self, req, batch, result, i, *args, **kwargs)


def _settle_plain(stats: Collector, req: Any) -> None:
    """A plain step of a speculating server: no verify, so nothing was drafted and nothing kept."""
    export.follow(stats, req)
    if req.finished():
        export.attach_summary(stats, req, SUMMARY_KEY)


def report(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the per-step report of the scheduler: the periodic line and the metrics."""
    stats = collector()
    batch = kwargs.get("running_batch") or (args[1] if len(args) > 1 else None)
    if batch is not None and all(req.finished() for req in batch.reqs):
        stats.clock.cut()
    done = original(self, *args, **kwargs)
    if self.forward_ct_decode % self.decode_log_interval == 0:
        stats.read()
        window = stats.take_window()
        verdict = stats.verdict(window)
        text = line(window, verdict)
        if text and self.is_stats_logging_rank:
            logger.info("%s", text)
        if self.current_scheduler_metrics_enabled:
            export.publish(stats, window, verdict, dict(self.metrics_collector.labels))
        export.write_baseline(stats)
    return done


def workers_ready(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the start of the workers: every rank reads back its environment, and rank 0 logs it."""
    done = original(self, *args, **kwargs)
    collector(_device(self.tp_worker))
    ranks.at_start(self)
    return done


def internal_state(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the scheduler's internal state: adds ``spec_stats``."""
    output = original(self, *args, **kwargs)
    stats = collector()
    stats.read()
    output.internal_state["spec_stats"] = export.snapshot(stats, self)
    return output


def meta_info(original: Original, self: Any, meta: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Around the answer's speculative fields: unpacks the request's summary."""
    original(self, meta, recv_obj, i)
    drafted = getattr(getattr(self, "server_args", None), "speculative_num_draft_tokens", None)
    export.unpack_summary(meta, SUMMARY_KEY, drafted - 1 if drafted else None)


def _take_back(processor: Any, req: Any, result: Any, i: int, accepted: int, kept: int) -> None:
    """Correct upstream's counts by the tokens behind the end of the request.

    Upstream counts the accepted run before the request's end is looked for. One verify, one entry: the
    entry moves to the number of drafts that were kept.
    """
    before, after = accepted - 1, max(0, kept - 1)
    lost = before - after
    if lost <= 0:
        return
    histogram = req.spec_correct_drafts_histogram
    if before < len(histogram) and histogram[before] > 0:
        histogram[before] -= 1
        histogram[after] += 1
        req.spec_num_correct_drafts -= lost
        while len(histogram) > 1 and histogram[-1] == 0:
            histogram.pop()
    result.num_correct_drafts -= lost
    reporter = processor.metrics_reporter
    reporter.spec_num_accept_tokens -= lost
    reporter.num_generated_tokens -= lost


def _end_of_step(stats: Collector, passes: tuple[str, ...]) -> None:
    stats.read()
    # A CPU has no graphs: nothing there is a fallback.
    if stats.device != "cpu":
        stats.graphs.end(passes)


def _device(worker: Any) -> str:
    return str(getattr(worker, "device", "cpu")).split(":")[0]


def _size(batch: Any) -> int:
    return len(batch.reqs)


def _context(batch: Any) -> int:
    """Mean prefix in tokens, from the host's lists: no device tensor is read."""
    reqs = batch.reqs
    if not reqs:
        return 0
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs) // len(reqs)
