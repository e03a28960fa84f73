"""Reading upstream's objects into the facts that ``admission`` judges."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.cycle_graph.admission import BatchFacts, ServerFacts
from sglang.srt.speculative.cycle_graph.driver import KeptGraph
from sglang.srt.speculative.cycle_graph.graphs import CycleGraphs
from sglang.srt.speculative.cycle_graph.wiring import Runners

ALGORITHMS = ("EAGLE", "EAGLE3")


def wants_kept_graphs() -> bool:
    """Whether graphs captured now may become part of a cycle: an EAGLE chain without the memory saver."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    return (
        arguments.speculative_algorithm in ALGORITHMS
        and arguments.speculative_eagle_topk == 1
        and not arguments.enable_memory_saver
        and not arguments.speculative_adaptive
    )


def server_facts(scheduler: Any) -> ServerFacts:
    """What the started scheduler is."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import overlap_utils
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    arguments, worker = scheduler.server_args, scheduler.draft_worker
    target = worker.target_worker.model_runner
    drafter = worker.draft_worker
    runners = Runners.of(worker)
    present = runners.present()
    graphs = [
        graph for runner in present.values() for graph in getattr(runner.backend, "_graphs", {}).values()
    ]
    config = arguments.cuda_graph_config
    hidden = getattr(getattr(runners.draft, "buffers", None), "hidden_states", None)
    return ServerFacts(
        device=str(scheduler.device).split(":")[0],
        algorithm=str(get_spec().speculative_algorithm),
        topk=int(worker.topk),
        steps=int(worker.speculative_num_steps) if hidden is not None else 0,
        overlap=bool(scheduler.enable_overlap),
        captured_passes=tuple(present),
        graph_backend=str(getattr(config.decode.backend, "value", config.decode.backend))
        if config
        else "full",
        kept_graphs=bool(graphs) and all(isinstance(graph, KeptGraph) for graph in graphs),
        adaptive=worker.adaptive_controller is not None,
        rejection_sampling=bool(get_spec().speculative_use_rejection_sampling),
        host_lengths=bool(scheduler.future_map.needs_cpu_seq_lens),
        data_parallel_attention=bool(arguments.enable_dp_attention)
        or any(bool(runner.require_gathered_buffer) for runner in present.values()),
        expert_parallel=int(arguments.ep_size) > 1 or bool(arguments.enable_eplb),
        pipeline_ranks=int(arguments.pp_size),
        two_batch_overlap=bool(arguments.enable_two_batch_overlap),
        plan_stream=worker.plan_stream is not None or drafter.plan_stream is not None,
        lora=bool(arguments.enable_lora),
        mrope=bool(getattr(target.model_config, "model_is_mrope", False)),
        encoder_decoder=bool(target.model_config.is_encoder_decoder),
        ring_pool=_keeps_more_than_slots(scheduler),
        disaggregated=str(arguments.disaggregation_mode) not in ("null", "None"),
        canary=target.canary_manager is not None or drafter.draft_runner.canary_manager is not None,
        expert_recorder=arguments.expert_distribution_recorder_mode is not None,
        returns_experts=get_global_experts_capturer() is not None
        or get_global_indexer_capturer() is not None,
        sanitizes_nan=bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get()),
        index_share=bool(drafter.seed_dsa_topk_from_draft_extend or drafter.index_share_for_mtp_iteration),
        relay_poisoned=bool(overlap_utils._DEBUG_ASSERT),
    )


def _keeps_more_than_slots(scheduler: Any) -> bool:
    """Caches whose state must be committed or cleared after a verify (mamba, compressed attention)."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    table = scheduler.req_to_token_pool
    return (
        getattr(pool, "clear_unaccepted_c128_draft_states", None) is not None
        or getattr(table, "mamba_pool", None) is not None
        or bool(getattr(scheduler, "enable_unified_memory", False))
        or bool(getattr(scheduler, "enable_hisparse", False))
    )


def batch_facts(batch: Any, graphs: CycleGraphs, worker: Any, *, relayed: bool) -> BatchFacts:
    """What one step of upstream's scheduler asks for."""
    info, size = batch.sampling_info, len(batch.reqs)
    penalisers = getattr(info, "run_penalizers", None)
    drawn = not info.is_all_greedy
    captured = graphs.size_for(size, drawn)
    return BatchFacts(
        size=size,
        captured=captured,
        captured_anew=not graphs.current(worker),
        larger_greedy=drawn and graphs.size_for(size) > 0,
        decode=batch.forward_mode.is_decode(),
        relayed=relayed and getattr(batch.spec_info, "future_indices", None) is not None,
        seeded=drawn and info.sampling_seed is not None,
        filters_in_turn=drawn and bool(info.need_min_p_sampling) and _filters_in_turn(),
        grammar=bool(batch.has_grammar),
        processors=bool(info.has_custom_logit_processor),
        penalties=info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or (penalisers is not None and penalisers.is_required),
        bias=info.logit_bias is not None,
        logprobs=bool(batch.return_logprob),
        hidden_states=bool(batch.return_hidden_states),
        embeddings=getattr(batch, "replace_embeds", None) is not None,
        stock_attention=stock_attention(worker, captured) if captured else "",
    )


def _filters_in_turn() -> bool:
    """Whether the plain sampler's min_p sees what top-k and top-p left, renormalised (flashinfer), not the whole."""
    from sglang.srt.runtime_context import get_exec

    return str(get_exec().kernel.sampling_backend) != "pytorch"


def stock_attention(worker: Any, batch: int) -> str:
    """A pass whose graph at this size needs preparation outside it; empty where every pass reads the request table."""
    from sglang.srt.layers.attention.verify.hooks import binding_of

    drafter, target = worker.draft_worker, worker.target_worker.model_runner
    steps = getattr(drafter.draft_attn_backend, "attn_backends", [])[: int(worker.speculative_num_steps) - 1]
    passes = (
        ("verify", "verify", [target.attn_backend]),
        ("draft_decode", "draft", list(steps)),
        ("draft_extend", "draft_extend", [drafter.draft_extend_attn_backend]),
    )
    for mode, name, backends in passes:
        for backend in backends or [None]:
            binding = binding_of(backend)
            if binding is None or not binding.fully_ours(mode, batch):
                return name
    return ""
