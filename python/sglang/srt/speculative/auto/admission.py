"""Where the switch may work: one answer for the server, one for each batch, both with a printable reason."""

from __future__ import annotations

from dataclasses import dataclass

PATH = "speculative-auto"


@dataclass(frozen=True)
class ServerFacts:
    """What the whole server decides.

    Attributes:
        wanted: ``--speculative-auto``.
        algorithm: speculative algorithm, upper case.
        topk: branches a draft step.
        device: device type.
        graphs: whether decode graphs are captured.
        target_backend: class name of the target's attention backend.
        draft_backend: class name of the draft's.
        draft_layers: attention layers of the draft.
        simulated: whether acceptance is simulated (a bench).
        on_cpu: whether the switch was asked for on a CPU, where it gains nothing.
        on_simulated: whether it was asked for together with simulated acceptance.
        dp_attention, pipeline, two_batch, pdmux, adaptive, multi_layer, disaggregated, lora, mrope, hybrid_pool,
            sliding_window, rejection_sampling, hisparse, encoder, streaming_session: features that the plain step
            does not serve yet.
    """

    wanted: bool
    algorithm: str
    topk: int
    device: str
    graphs: bool
    target_backend: str
    draft_backend: str
    draft_layers: int
    simulated: bool = False
    on_cpu: bool = False
    on_simulated: bool = False
    dp_attention: bool = False
    pipeline: bool = False
    two_batch: bool = False
    pdmux: bool = False
    adaptive: bool = False
    multi_layer: bool = False
    disaggregated: bool = False
    lora: bool = False
    mrope: bool = False
    hybrid_pool: bool = False
    sliding_window: bool = False
    rejection_sampling: bool = False
    hisparse: bool = False
    encoder: bool = False
    streaming_session: bool = False


@dataclass(slots=True)
class BatchFacts:
    """What a batch decides. Made in every step, so it is not frozen: that would make it three times as dear.

    Attributes:
        requests: requests in it.
        grammar: one of them follows a grammar.
        logprobs: one of them returns log-probabilities.
        hidden_states: one of them returns hidden states.
        penalties: one of them has a penalty or a minimum of tokens.
        processors: one of them brings a custom logit processor.
        whole: every request has the target's hidden state of its last token, from which the draft can go on.
    """

    requests: int
    grammar: bool = False
    logprobs: bool = False
    hidden_states: bool = False
    penalties: bool = False
    processors: bool = False
    whole: bool = True


BACKENDS = ("TritonAttnBackend", "CpuEagleAttention")
FEATURES = (
    ("dp_attention", "data-parallel attention: ranks would have to agree in every step"),
    ("pipeline", "pipeline parallelism"),
    ("two_batch", "two-batch overlap"),
    ("pdmux", "PD multiplexing"),
    ("adaptive", "--speculative-adaptive chooses the steps"),
    ("multi_layer", "a draft of several models"),
    ("disaggregated", "prefill and decode on different servers"),
    ("lora", "LoRA adapters"),
    ("mrope", "multimodal rotary positions"),
    ("hybrid_pool", "a model with linear-attention state"),
    ("sliding_window", "a sliding-window KV pool"),
    ("rejection_sampling", "rejection sampling keeps draft probabilities"),
    ("hisparse", "hierarchical sparse attention"),
    ("encoder", "an encoder-decoder model"),
    ("streaming_session", "streaming sessions hand on KV that the draft has not written yet"),
)


def admit_server(facts: ServerFacts) -> str | None:
    """Why the switch stays off on this server; None when it works."""
    if not facts.wanted:
        return "--speculative-auto off"
    if facts.algorithm not in ("EAGLE", "EAGLE3"):
        return f"the algorithm is {facts.algorithm or 'none'}, not EAGLE or EAGLE3"
    if facts.topk != 1:
        return f"the draft is a tree (top-k {facts.topk})"
    for name, words in FEATURES:
        if getattr(facts, name):
            return words
    if facts.simulated and not facts.on_simulated:
        return "acceptance is simulated: whoever does that measures cycles"
    if facts.device == "cpu" and not facts.on_cpu:
        return "a CPU has no graphs to decode with"
    if facts.device != "cpu" and not facts.graphs:
        return "CUDA graphs are disabled, so there is no captured decode"
    for side, backend in (("target", facts.target_backend), ("draft", facts.draft_backend)):
        if backend not in BACKENDS:
            return f"the {side}'s attention backend is {backend}; it has to be one of {', '.join(BACKENDS)}"
    if facts.draft_layers != 1:
        return f"the draft has {facts.draft_layers} layers: its KV cannot be caught up without attention"
    return None


def admit_batch(facts: BatchFacts) -> str | None:
    """Why this batch cannot decode plainly; None when it can."""
    if facts.requests == 0:
        return "an idle step"
    if facts.grammar:
        return "a request follows a grammar"
    if facts.logprobs:
        return "a request returns log-probabilities"
    if facts.hidden_states:
        return "a request returns hidden states"
    if facts.penalties:
        return "a request has penalties"
    if facts.processors:
        return "a request brings a logit processor"
    if not facts.whole:
        return "a request came without the target's hidden states"
    return None
