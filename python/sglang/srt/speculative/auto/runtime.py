"""The switch of one worker: what the controller is told, and what its decisions cost the draft."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.fork import counters, fallbacks
from sglang.srt.distributed.one_shot.exchange import Exchange
from sglang.srt.speculative.auto import catch_up, failure
from sglang.srt.speculative.auto.admission import PATH, BatchFacts, admit_batch
from sglang.srt.speculative.auto.cells import MODES, PLAIN, SPECULATE
from sglang.srt.speculative.auto.controller import Controller, Scripted
from sglang.srt.speculative.auto.plain import Stubs
from sglang.srt.speculative.auto.recent import CAUGHT_UP, CHANGED, PREFILLED, STEADY, Recent
from sglang.srt.speculative.auto.rows import RowRing
from sglang.srt.speculative.cycle_graph.contexts import as_draft

logger = logging.getLogger("sglang.fork.auto")

ATTRIBUTE = "fork_auto"
# Kept on a request: rows the draft owes, and whether the row of its last prefilled token is in the ring.
OWED, WHOLE = "fork_owed_rows", "fork_row_kept"
SCRIPT = "SGLANG_SPEC_AUTO_SCRIPT"
STEPPED = {mode: counters.bound("spec_auto_steps", mode=mode) for mode in MODES}
COUNTED = {
    "switch": "spec_auto_switches",
    "probe": "spec_auto_probes",
    "drop": "spec_auto_probes_dropped",
}


def runtime_of(worker: Any) -> Runtime | None:
    """The switch of a worker; None where it is off."""
    return getattr(worker, ATTRIBUTE, None)


def make_controller() -> Controller | Scripted:
    """The live controller, or the scripted one that tests ask for."""
    every = os.environ.get(SCRIPT, "")
    return Scripted(int(every)) if every.isdigit() and int(every) > 0 else Controller()


@dataclass(slots=True)
class Begun:
    """A step that was begun and not yet timed.

    Attributes:
        mode: of the step.
        size: requests.
        context: mean tokens of a request.
        kind: see ``recent``.
        at: when, in seconds.
    """

    mode: str
    size: int
    context: int
    kind: str
    at: float


class Runtime:
    """Everything the switch keeps about one worker.

    Args:
        worker: upstream's EAGLE worker.
        ring: rows that the draft may come to owe.
        stubs: what a plain result carries and nobody reads.
        graphs: plain decode graphs; None on a CPU.
        controller: decides.
    """

    def __init__(
        self, worker: Any, ring: RowRing, stubs: Stubs, graphs: Any, controller: Controller | Scripted
    ) -> None:
        self.worker, self.ring, self.stubs, self.graphs = worker, ring, stubs, graphs
        self.controller = controller
        self.recent = Recent()
        self._last: Begun | None = None
        # Requests all of which were found whole: their list, and how many it held.
        self._whole: tuple[Any, int] = (None, 0)
        # The mode before, steps since it changed, and whether the step before this one wrote rows for the draft.
        self._mode_before, self._unchanged, self._wrote = SPECULATE, 0, False
        self._draft_behind = False
        self._relayed: tuple[bool, bool] | None = None
        self.gave_up: str | None = None
        # Plain steps that were begun: the same number on every rank.
        self.plain_begun = 0

    # What happens in a step.

    def choose(self, batch: Any) -> str:
        """The mode of this step. Every rank gets the same answer."""
        size, context = len(batch.reqs), mean_context(batch)
        self._tell_time(size)
        leads = self.controller.at_epoch()
        mode = self.controller.choose(size, context)
        if leads:
            mode = self._agree(mode)
        if mode == PLAIN:
            reason = self.gave_up or admit_batch(batch_facts(batch, self._are_whole(batch.reqs)))
            if reason is not None:
                fallbacks.record(PATH, reason)
                mode = SPECULATE
        if leads:
            for event in self.controller.drain():
                self._report(event)
        STEPPED[mode]()
        self._last = Begun(mode, size, context, self._kind(mode), time.perf_counter())
        return mode

    @property
    def context(self) -> int:
        """Mean tokens of a request in the step that was chosen last."""
        return self._last.context if self._last is not None else 0

    def cut(self) -> None:
        """What follows does not follow directly: a prefill lies between."""
        self._last = None

    def before_plain(self, batch: Any, on_publish: Any) -> None:
        """Book a plain step; rows that the ring could not hold any more are written first."""
        self.plain_begun += 1
        relay = relay_of(on_publish)
        if relay is not None and self._relayed is None:
            # Draft inputs need not travel from plain step to plain step: three copies a step.
            self._relayed = (relay.need_topk, relay.need_hidden_states)
            relay.need_topk = relay.need_hidden_states = False
        owed = [int(getattr(request, OWED, 0)) for request in batch.reqs]
        if max(owed) >= self.ring.span:
            self._write(batch, owed)
        for request in batch.reqs:
            setattr(request, OWED, int(getattr(request, OWED, 0)) + 1)
        self._draft_behind = True

    def before_cycle(self, batch: Any, on_publish: Any) -> None:
        """Make the draft whole, if plain steps lie behind."""
        if not self._draft_behind:
            return
        self._draft_behind = False
        self._write(batch, [int(getattr(request, OWED, 0)) for request in batch.reqs])
        with as_draft(self.worker.draft_worker):
            catch_up.seed(self.worker, self.ring, self._table(), batch)
        relay = relay_of(on_publish)
        if relay is not None and self._relayed is not None:
            relay.need_topk, relay.need_hidden_states = self._relayed
            self._relayed = None
            _stash(relay, batch)

    def exchange(self) -> Exchange | None:
        """Through which the ranks tell each other that a plain step failed; None for one rank."""
        return failure.exchange_of(self.worker.target_worker.model_runner.tp_group)

    def give_up(self, batch: Any, reason: str) -> None:
        """Never decode plainly again; the step that was booked for ``batch`` did not run."""
        self.gave_up = reason
        fallbacks.record(PATH, reason)
        for request in batch.reqs:
            setattr(request, OWED, max(0, int(getattr(request, OWED, 0)) - 1))

    def after_prefill(self, batch: Any, result: Any) -> None:
        """Keep the row of each request's last token: a draft that catches up starts there."""
        states = getattr(result.logits_output, "hidden_states", None)
        if states is None or batch.forward_mode.is_idle():
            return
        lengths = list(batch.extend_lens)
        if states.shape[0] != sum(lengths) or states.shape[-1] != self.ring.width:
            return
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
        device = states.device
        if device.type != "cpu":
            ends = ends.pin_memory().to(device, non_blocking=True)
        self.ring.store(batch.req_pool_indices, batch.seq_lens - 1, states[ends], result.next_token_ids)
        for request in batch.reqs:
            setattr(request, WHOLE, True)
            setattr(request, OWED, 0)

    def settled(self, result: Any) -> None:
        """A cycle's accept lengths are on the host."""
        drafts = result.num_correct_drafts_per_req_cpu
        if drafts:
            self.controller.kept(1.0 + sum(drafts) / len(drafts), len(drafts))

    @contextmanager
    def plain_graphs(self, runner: Any) -> Iterator[None]:
        """The target replays plain decode inside."""
        kept = runner.decode_cuda_graph_runner
        runner.decode_cuda_graph_runner = self.graphs
        try:
            yield
        finally:
            runner.decode_cuda_graph_runner = kept

    # Reports.

    def state(self) -> dict[str, Any]:
        """For the server's state: plain builtins."""
        rules = self.controller
        return {
            "mode": rules.mode,
            "probing": rules.probing,
            "gave_up": self.gave_up,
            "switches": rules.switches,
            "probes": rules.probes,
            "probes_dropped": rules.dropped,
            "kept": rules.kept_tokens.mean,
            "probe_loss_ms": round(rules.lost_ms, 3),
            "spent_ms": round(rules.spent_ms, 3),
            "ring_rows": self.ring.span,
            "ring_bytes": self.ring.bytes,
            "ms": [
                {"mode": mode, "batch": key[0], "context": 1 << key[1], "ms": samples.ms}
                for mode, key, samples in rules.cells
                if samples.ms is not None
            ],
            "recent": self.recent.summary(),
        }

    # Parts.

    def _tell_time(self, size: int) -> None:
        last = self._last
        if last is None or last.size != size:
            return
        ms = (time.perf_counter() - last.at) * 1e3
        self.recent.add(last.mode, last.kind, ms)
        # The first step behind a prefill is as long as what is left of that: no figure of its mode.
        if last.kind != PREFILLED:
            self.controller.took(last.mode, size, last.context, ms)

    def _are_whole(self, requests: Any) -> bool:
        """Whether all have the row that the draft goes on from; who has it keeps it, and most steps ask of the same."""
        known, count = self._whole
        if known is requests and count == len(requests):
            return True
        whole = all(getattr(request, WHOLE, False) for request in requests)
        if whole:
            self._whole = (requests, len(requests))
        return whole

    def _kind(self, mode: str) -> str:
        """What the step that begins is, apart from its mode; rows written in it are noted by ``_write``."""
        last, wrote, self._wrote = self._last, self._wrote, False
        self._unchanged = self._unchanged + 1 if mode == self._mode_before else 0
        self._mode_before = mode
        if last is None:
            return PREFILLED
        if self._unchanged < 2:
            return CHANGED
        return CAUGHT_UP if wrote else STEADY

    def _agree(self, mode: str) -> str:
        """Rank 0's decision: times differ from rank to rank, and a rank that decodes alone would wait forever."""
        runner = self.worker.target_worker.model_runner
        group = runner.tp_group
        if int(getattr(group, "world_size", 1) or 1) == 1:
            return mode
        word = torch.tensor([int(mode == PLAIN)], dtype=torch.int32)
        torch.distributed.broadcast(word, src=group.ranks[0], group=group.cpu_group)
        agreed = PLAIN if int(word.item()) else SPECULATE
        self.controller.follow(agreed)
        return agreed

    def _report(self, event: Any) -> None:
        counters.add(COUNTED[event.kind], to=event.mode)
        if self.worker.target_worker.model_runner.ps.tp_rank != 0:
            return
        words = "plain decode" if event.mode == PLAIN else "speculation"
        if event.kind == "switch":
            logger.info("Switched to %s: %s", words, event.verdict.text())
        else:
            word = "Probing" if event.kind == "probe" else "Learnt too little from a probe of"
            logger.debug("%s %s: %s", word, words, event.verdict.text())

    def _write(self, batch: Any, owed: list[int]) -> None:
        owed = [min(rows, self.ring.span) for rows in owed]
        with as_draft(self.worker.draft_worker):
            rows = catch_up.write_rows(self.worker.draft_worker, self.ring, self._table(), batch, owed)
        counters.add("spec_auto_caught_up_rows", rows)
        counters.add("spec_auto_catch_ups")
        self._wrote = True
        if self._last is not None and self._last.kind == STEADY:
            self._last.kind = CAUGHT_UP
        for request in batch.reqs:
            setattr(request, OWED, 0)

    def _table(self) -> torch.Tensor:
        table: torch.Tensor = self.worker.target_worker.model_runner.req_to_token_pool.req_to_token
        return table


def mean_context(batch: Any) -> int:
    """Mean tokens of a request, from the host's lists."""
    requests = batch.reqs
    total = sum(len(request.origin_input_ids) + len(request.output_ids) for request in requests)
    return total // max(1, len(requests))


def batch_facts(batch: Any, whole: bool) -> BatchFacts:
    """What decides whether a batch may decode plainly; ``whole`` as in the facts."""
    info = batch.sampling_info
    penalizers = info.penalizer_orchestrator or getattr(info, "run_penalizers", None)
    return BatchFacts(
        requests=len(batch.reqs),
        grammar=bool(batch.has_grammar),
        logprobs=bool(batch.return_logprob),
        hidden_states=bool(batch.return_hidden_states),
        penalties=bool(penalizers is not None and penalizers.is_required),
        processors=bool(info.has_custom_logit_processor),
        whole=whole,
    )


def relay_of(on_publish: Any) -> Any:
    """The relay between steps that ``on_publish`` belongs to; None where steps hand over directly."""
    return getattr(getattr(on_publish, "func", None), "__self__", None)


def _stash(relay: Any, batch: Any) -> None:
    """Put the new draft inputs where the relay keeps them: a cycle that runs as one graph reads them there."""
    from sglang.srt.managers.overlap_utils import RelayPayload

    relay.stash(batch.req_pool_indices, RelayPayload.from_draft_input(batch.spec_info))
