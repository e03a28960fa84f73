"""Which steps run as one graph: every refusal by name, as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sglang.srt.speculative.cycle_graph.admission import BatchFacts, ServerFacts, admit, admit_server

SERVER = (
    ({"device": "cpu"}, "not a CUDA device"),
    ({"algorithm": "NGRAM"}, "the algorithm is not EAGLE"),
    ({"topk": 4}, "draft trees (topk above 1)"),
    ({"steps": 1}, "fewer than two draft steps"),
    ({"overlap": False}, "overlap scheduling is off"),
    ({"graph_backend": "breakable"}, "the decode graph backend is not full"),
    ({"captured_passes": ("verify",)}, "no graph of draft, draft_extend"),
    ({"memory_saver": True}, "graphs are under the memory saver"),
    ({"kept_graphs": False}, "graphs were captured without their nodes"),
    ({"adaptive": True}, "adaptive draft steps"),
    ({"rejection_sampling": True}, "rejection sampling"),
    ({"host_lengths": True}, "an attention backend needs lengths on the host"),
    ({"data_parallel_attention": True}, "data-parallel attention"),
    ({"expert_parallel": True}, "expert parallelism"),
    ({"pipeline_ranks": 2}, "pipeline parallelism"),
    ({"two_batch_overlap": True}, "two-batch overlap"),
    ({"plan_stream": True}, "planning on a stream of its own"),
    ({"lora": True}, "LoRA"),
    ({"mrope": True}, "multi-dimensional rotary positions"),
    ({"encoder_decoder": True}, "encoder-decoder model"),
    ({"ring_pool": True}, "a cache with state beside the KV slots"),
    ({"disaggregated": True}, "disaggregated prefill"),
    ({"canary": True}, "the KV canary"),
    ({"expert_recorder": True}, "experts are recorded"),
    ({"returns_experts": True}, "routed experts are returned"),
    ({"sanitizes_nan": True}, "SGLANG_SANITIZE_NAN_LOGITS"),
    ({"index_share": True}, "sparse-attention indices are shared between draft steps"),
    ({"relay_poisoned": True}, "SGLANG_IS_IN_CI poisons the relay"),
)
BATCH = (
    ({"decode": False}, "not a decode step"),
    ({"size": 0}, "an idle step"),
    ({"captured_anew": True}, "the passes were captured anew"),
    ({"captured": 0}, "no captured batch size holds the batch"),
    ({"relayed": False}, "inputs do not come from the relay"),
    ({"grammar": True}, "a request has a grammar"),
    ({"processors": True}, "a request has a custom logit processor"),
    ({"penalties": True}, "a request has penalties or min_new_tokens"),
    ({"bias": True}, "a request has a logit bias"),
    ({"captured": 0, "larger_greedy": True}, "no graph for a sampled batch of this size"),
    ({"seeded": True}, "a sampled request has a seed"),
    ({"filters_in_turn": True}, "the sampler applies min_p behind the other filters"),
    ({"logprobs": True}, "log probabilities are wanted"),
    ({"hidden_states": True}, "hidden states are wanted"),
    ({"embeddings": True}, "a request brings its own embeddings"),
    ({"stock_attention": "verify"}, "attention of verify is prepared outside its graph"),
)


@pytest.mark.parametrize(("change", "reason"), SERVER, ids=[reason for _, reason in SERVER])
def test_server(change: dict[str, Any], reason: str) -> None:
    assert admit_server(dataclasses.replace(ServerFacts(), **change)).reason == reason


@pytest.mark.parametrize(("change", "reason"), BATCH, ids=[reason for _, reason in BATCH])
def test_batch(change: dict[str, Any], reason: str) -> None:
    found = admit(dataclasses.replace(BatchFacts(), **change))
    assert not found.ok and found.reason == reason


def test_defaults_are_admitted() -> None:
    assert admit_server(ServerFacts()).ok and admit(BatchFacts()).ok


def test_the_tables_leave_no_fact_out() -> None:
    for facts, table in ((ServerFacts, SERVER), (BatchFacts, BATCH)):
        names = {field.name for field in dataclasses.fields(facts)}
        assert names == {name for change, _ in table for name in change}
