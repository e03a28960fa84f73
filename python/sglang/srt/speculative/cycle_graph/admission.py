"""May this step run as one graph? Two functions: what a server can never do, and what one batch cannot.

Every "no" has a printable reason without varying numbers; it ends in ``sglang.fork.fallbacks`` under ``cycle-graph``
and the step takes upstream's three graphs. Whether it would be *faster* is not asked here.
"""

from __future__ import annotations

from dataclasses import dataclass

PATH = "cycle-graph"


@dataclass(frozen=True)
class Admission:
    """``ok``, or the reason why not."""

    ok: bool
    reason: str = ""


ADMITTED = Admission(True)


@dataclass(frozen=True)
class ServerFacts:
    """What is fixed when the server has started. Defaults describe a server that can."""

    device: str = "cuda"
    algorithm: str = "EAGLE3"
    topk: int = 1
    steps: int = 2
    overlap: bool = True
    captured_passes: tuple[str, ...] = ("draft", "verify", "draft_extend")
    graph_backend: str = "full"
    kept_graphs: bool = True
    adaptive: bool = False
    rejection_sampling: bool = False
    host_lengths: bool = False
    data_parallel_attention: bool = False
    expert_parallel: bool = False
    pipeline_ranks: int = 1
    two_batch_overlap: bool = False
    plan_stream: bool = False
    lora: bool = False
    mrope: bool = False
    encoder_decoder: bool = False
    ring_pool: bool = False
    disaggregated: bool = False
    canary: bool = False
    expert_recorder: bool = False
    returns_experts: bool = False
    sanitizes_nan: bool = False
    index_share: bool = False
    memory_saver: bool = False
    relay_poisoned: bool = False


def admit_server(facts: ServerFacts) -> Admission:
    """Whether any step of this server can; the first reason that applies."""
    missing = {"draft", "verify", "draft_extend"} - set(facts.captured_passes)
    tests = (
        (facts.device != "cuda", "not a CUDA device"),
        (facts.algorithm not in ("EAGLE", "EAGLE3"), "the algorithm is not EAGLE"),
        (facts.topk != 1, "draft trees (topk above 1)"),
        (facts.steps < 2, "fewer than two draft steps"),
        (not facts.overlap, "overlap scheduling is off"),
        (facts.graph_backend != "full", "the decode graph backend is not full"),
        (bool(missing), f"no graph of {', '.join(sorted(missing))}"),
        (facts.memory_saver, "graphs are under the memory saver"),
        (not facts.kept_graphs, "graphs were captured without their nodes"),
        (facts.adaptive, "adaptive draft steps"),
        (facts.rejection_sampling, "rejection sampling"),
        (facts.host_lengths, "an attention backend needs lengths on the host"),
        (facts.data_parallel_attention, "data-parallel attention"),
        (facts.expert_parallel, "expert parallelism"),
        (facts.pipeline_ranks > 1, "pipeline parallelism"),
        (facts.two_batch_overlap, "two-batch overlap"),
        (facts.plan_stream, "planning on a stream of its own"),
        (facts.lora, "LoRA"),
        (facts.mrope, "multi-dimensional rotary positions"),
        (facts.encoder_decoder, "encoder-decoder model"),
        (facts.ring_pool, "a cache with state beside the KV slots"),
        (facts.disaggregated, "disaggregated prefill"),
        (facts.canary, "the KV canary"),
        (facts.expert_recorder, "experts are recorded"),
        (facts.returns_experts, "routed experts are returned"),
        (facts.sanitizes_nan, "SGLANG_SANITIZE_NAN_LOGITS"),
        (facts.index_share, "sparse-attention indices are shared between draft steps"),
        (facts.relay_poisoned, "SGLANG_IS_IN_CI poisons the relay"),
    )
    for refused, reason in tests:
        if refused:
            return Admission(False, reason)
    return ADMITTED


@dataclass(frozen=True)
class BatchFacts:
    """What one step asks for. Defaults describe a step that can.

    Attributes:
        size: requests.
        captured: a captured batch size that holds them, 0 if none does.
        larger_greedy: there is one, but not for sampled batches.
        captured_anew: the passes were captured again after the cycle was.
        stock_attention: a pass whose graph of that size holds a stock attention kernel, which is prepared outside.
    """

    size: int = 1
    captured: int = 1
    larger_greedy: bool = False
    captured_anew: bool = False
    decode: bool = True
    relayed: bool = True
    seeded: bool = False
    filters_in_turn: bool = False
    grammar: bool = False
    processors: bool = False
    penalties: bool = False
    bias: bool = False
    logprobs: bool = False
    hidden_states: bool = False
    embeddings: bool = False
    stock_attention: str = ""


def admit(facts: BatchFacts) -> Admission:
    """Whether this step can; the first reason that applies."""
    tests = (
        (not facts.decode, "not a decode step"),
        (facts.size == 0, "an idle step"),
        (facts.captured_anew, "the passes were captured anew"),
        (facts.captured == 0 and facts.larger_greedy, "no graph for a sampled batch of this size"),
        (facts.captured == 0, "no captured batch size holds the batch"),
        (not facts.relayed, "inputs do not come from the relay"),
        (facts.grammar, "a request has a grammar"),
        (facts.processors, "a request has a custom logit processor"),
        (facts.penalties, "a request has penalties or min_new_tokens"),
        (facts.bias, "a request has a logit bias"),
        (facts.seeded, "a sampled request has a seed"),
        (facts.filters_in_turn, "the sampler applies min_p behind the other filters"),
        (facts.logprobs, "log probabilities are wanted"),
        (facts.hidden_states, "hidden states are wanted"),
        (facts.embeddings, "a request brings its own embeddings"),
        (bool(facts.stock_attention), f"attention of {facts.stock_attention} is prepared outside its graph"),
    )
    for refused, reason in tests:
        if refused:
            return Admission(False, reason)
    return ADMITTED
