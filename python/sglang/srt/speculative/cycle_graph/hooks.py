"""Entry points of the topic ``cycle-graph``: what patched upstream lines call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.fork import counters, fallbacks
from sglang.srt.speculative.cycle_graph.admission import PATH, Admission, admit, admit_server
from sglang.srt.speculative.cycle_graph.driver import KeptGraph
from sglang.srt.speculative.cycle_graph.facts import batch_facts, server_facts, wants_kept_graphs
from sglang.srt.speculative.cycle_graph.graphs import CycleGraphs, Launched, build
from sglang.srt.speculative.cycle_graph.ranks import agreed

logger = logging.getLogger(__name__)
Original = Callable[..., Any]

ATTRIBUTE = "fork_cycle_graphs"
# Handed to upstream in place of tensors that the graph has already put into the relay.
RELAYED = torch.empty(0, dtype=torch.int64)


def new_graph(original: Original, *args: Any, **kwargs: Any) -> Any:
    """In place of the graph object of a full-graph capture: one that keeps its nodes, where they will be wanted."""
    return KeptGraph() if not args and not kwargs and wants_kept_graphs() else original(*args, **kwargs)


def overlap_ready(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Around the start of overlap scheduling, the first moment at which both graphs and relay exist: build."""
    original(scheduler, *args, **kwargs)
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None or not hasattr(worker, "draft_worker"):
        return
    admission, graphs = admit_server(server_facts(scheduler)), None
    if admission.ok:
        graphs, admission = _build(worker, scheduler.future_map)
        sizes = agreed(
            graphs.entries if graphs is not None else (), worker.target_worker.model_runner.tp_group
        )
        if graphs is not None and sizes != set(graphs.entries):
            logger.warning(
                "cycle-graph: another rank lacks graphs that this one has; %d are kept", len(sizes)
            )
            graphs.keep(sizes)
    if not admission.ok and str(worker.device).startswith("cuda"):
        logger.info("cycle-graph: every cycle runs as three graphs: %s", admission.reason)
    setattr(worker, ATTRIBUTE, (graphs, admission))


def _build(worker: Any, future_map: Any) -> tuple[CycleGraphs | None, Admission]:
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_TOKEN_MODE

    try:
        return build(
            worker, future_map, real_tokens=SIMULATE_ACC_TOKEN_MODE == "real-draft-token"
        ), Admission(True)
    except (RuntimeError, ValueError) as error:
        logger.exception("cycle-graph: capture failed, cycles run as three graphs")
        return None, Admission(False, f"capture failed: {type(error).__name__}")


def graphs_of(worker: Any) -> tuple[CycleGraphs | None, Admission]:
    """The worker's parent graphs, or why it has none."""
    found: tuple[CycleGraphs | None, Admission] = getattr(
        worker, ATTRIBUTE, (None, Admission(False, "the scheduler has not started"))
    )
    return found


def admission_of(worker: Any, batch: Any, on_publish: Any) -> Admission:
    """Whether this step of the worker runs as one graph."""
    graphs, admission = graphs_of(worker)
    if graphs is None:
        return admission
    return admit(batch_facts(batch, graphs, worker, relayed=on_publish is not None))


def cycle(
    original: Original, worker: Any, batch: Any, on_publish: Any = None, grammar_barrier: Any = None
) -> Any:
    """Around the worker's step: one graph where it is admitted, upstream's way where not."""
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
        return original(worker, batch, on_publish=on_publish, grammar_barrier=grammar_barrier)
    admission = admission_of(worker, batch, on_publish)
    if not admission.ok:
        # A CPU has no graphs: nothing there is a fallback.
        if str(worker.device).startswith("cuda") or graphs_of(worker)[0] is not None:
            fallbacks.record(PATH, admission.reason)
        return original(worker, batch, on_publish=on_publish, grammar_barrier=grammar_barrier)
    graphs = graphs_of(worker)[0]
    assert graphs is not None
    return _run(graphs, worker, batch, on_publish)


def _run(graphs: CycleGraphs, worker: Any, batch: Any, on_publish: Any) -> Any:
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.utils.device_timer import device_timer_ctx

    runner = worker.target_worker.model_runner
    runner.forward_pass_id += 1
    with device_timer_ctx(runner.device_timer, "eagle_cycle"):
        info = batch.sampling_info
        sampling = None if info.is_all_greedy else info
        launched = graphs.launch(batch.req_pool_indices, _simulated_length(graphs.width), sampling)
    _note_statistics(launched)
    on_publish(RELAYED)
    counters.add("cycle_graph_replays", batch=launched.batch)
    return GenerationBatchResult(
        logits_output=_logits_output(launched),
        next_token_ids=launched.tokens,
        accept_lens=launched.lengths,
        can_run_cuda_graph=True,
        speculative_num_draft_tokens=graphs.width,
        next_draft_input=EagleDraftInput(bonus_tokens=RELAYED),
    )


def _logits_output(launched: Launched) -> Any:
    from sglang.fork.topics import enabled
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative.semantics.nonfinite_hooks import GOOD_TOKENS

    output = LogitsProcessorOutput(next_token_logits=None)
    if enabled("run-nonfinite"):
        setattr(output, GOOD_TOKENS, launched.good)
    return output


def _simulated_length(width: int) -> int:
    from sglang.srt.speculative import spec_utils

    if spec_utils.SIMULATE_ACC_LEN <= 0:
        return 0
    length: int = spec_utils._sample_simulated_acc_len(
        spec_utils.SIMULATE_ACC_LEN, spec_utils.SIMULATE_ACC_METHOD, width
    )
    return length


def _note_statistics(launched: Launched) -> None:
    from sglang.fork.topics import enabled

    if enabled("verify-stats"):
        from sglang.srt.speculative.stats.collector import collector

        stats = collector()
        stats.clock.split(launched.phases)
        stats.graphs.replay_whole("cycle")


def publish(
    original: Original, future_map: Any, indices: Any, lengths: Any, *args: Any, **kwargs: Any
) -> None:
    """Around the relay's publication of lengths: the graph has written them, only the event is left to record."""
    if lengths is not RELAYED:
        original(future_map, indices, lengths, *args, **kwargs)
        return
    module: Any = torch.get_device_module(future_map.device)
    if future_map.publish_ready is None:
        future_map.publish_ready = module.Event()
    else:
        # A publication off this stream must not be forgotten by the new record.
        module.current_stream().wait_event(future_map.publish_ready)
    future_map.publish_ready.record()
    future_map._publish_fresh = True


def stash(original: Original, future_map: Any, indices: Any, payload: Any) -> None:
    """Around the relay's stash of the next draft's inputs: the graph has written them."""
    if payload.bonus_tokens is not RELAYED:
        original(future_map, indices, payload)
