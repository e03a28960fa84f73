"""The reason function against a table, and against upstream's own predicate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.graph_policy import reasons
from sglang.srt.speculative.graph_policy.facts import explain, facts_of
from sglang.srt.speculative.graph_policy.reasons import Facts, Ragged, why_eager

GOOD = Facts(batch=3, sizes=(1, 2, 4, 8), captured_width=3, width=3)
RAGGED = Ragged(tokens=9, largest=24, slots=8)


@dataclass(frozen=True)
class Row:
    """One row of the table: what differs from a batch that replays, and the answer."""

    name: str
    changes: dict[str, Any]
    reason: str | None
    detail: str = ""


TABLE = (
    Row("replays", {}, None),
    Row("off", {"switched_off": True}, reasons.OFF),
    Row("nothing captured", {"sizes": (), "absent": "disabled"}, reasons.NOT_CAPTURED, "disabled"),
    Row("own embeddings", {"own_embeddings": True}, reasons.OWN_EMBEDDINGS),
    Row("another width", {"width": 2}, reasons.WIDTH, "2 tokens, captured 3"),
    Row("no stated width", {"width": 0}, None),
    Row("largest", {"batch": 8}, None),
    Row("above the largest", {"batch": 9}, reasons.SIZE, "batch 9, largest 8"),
    Row("padded up", {"batch": 5}, None),
    Row("not a size", {"batch": 5, "padding": False}, reasons.NOT_A_SIZE, "--cuda-graph-bs-decode"),
    Row("an exact size", {"batch": 4, "padding": False}, None),
    Row("another rank is larger", {"of_ranks": 9}, reasons.SIZE_OF_RANKS, "batch 9"),
    Row("another rank fits", {"of_ranks": 8}, None),
    Row("a rank prefills", {"ranks_ready": False}, reasons.RANKS),
    Row("all ranks decode", {"ranks_ready": True}, None),
    Row("no encoder tokens", {"encoder": False}, reasons.ENCODER),
    Row("encoder tokens", {"encoder": True}, None),
    Row("cannot be split", {"two_batch": False}, reasons.TWO_BATCH),
    Row("can be split", {"two_batch": True}, None),
    Row("n-gram tokens short", {"tokens": 8}, reasons.TOKENS, "8 tokens, captured 9"),
    Row("n-gram tokens", {"tokens": 9}, None),
    Row("ragged", {"ragged": RAGGED}, None),
    Row("ragged without layout", {"ragged": Ragged(layout=False)}, reasons.RAGGED_LAYOUT),
    Row("ragged backend", {"ragged": replace(RAGGED, backend=False)}, reasons.RAGGED_BACKEND),
    Row("ragged tokens", {"ragged": replace(RAGGED, tokens=25)}, reasons.RAGGED_SIZE),
    Row("ragged slots", {"ragged": replace(RAGGED, slots=2)}, reasons.RAGGED_SIZE),
    Row("ragged ranks", {"ragged": RAGGED, "ranks_ready": False}, reasons.RANKS),
    Row("ragged encoder", {"ragged": RAGGED, "encoder": False}, reasons.ENCODER),
    Row("ragged hidden states", {"ragged": RAGGED, "hidden_fits": False}, reasons.HIDDEN_STATES),
    Row("embeddings before width", {"own_embeddings": True, "width": 2}, reasons.OWN_EMBEDDINGS),
    Row("width before size", {"width": 2, "batch": 9}, reasons.WIDTH),
    Row("size before ranks", {"batch": 9, "ranks_ready": False}, reasons.SIZE),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_table(row: Row) -> None:
    found = why_eager(replace(GOOD, **row.changes))
    assert (found.reason if found else None) == row.reason
    assert row.detail in (found.detail if found else "")


def test_a_reason_never_holds_a_number_that_changes() -> None:
    """Reasons are labels of a metric: two batches that fail alike share one."""
    texts = {why_eager(replace(GOOD, batch=size)).reason for size in (9, 10, 4711)}  # type: ignore[union-attr]
    assert len(texts) == 1


class Mode:
    """A forward mode."""

    def is_target_verify(self) -> bool:
        """A verify."""
        return True

    def is_idle(self) -> bool:
        """Not idle."""
        return False


def runner_and_batch(facts: Facts) -> tuple[Any, Any]:
    """Upstream's objects as far as its predicate reads them, made from facts."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    runner: Any = DecodeCudaGraphRunner.__new__(DecodeCudaGraphRunner)
    runner.capture_bs, runner.max_bs = list(facts.sizes), facts.sizes[-1]
    runner.captured_req_width, runner.disable_padding = facts.captured_width, not facts.padding
    runner.capture_forward_mode = Mode()
    runner.ragged_verify_mode = False
    runner.require_mlp_tp_gather = facts.of_ranks is not None
    runner.require_mlp_sync = facts.ranks_ready is not None
    runner.is_encoder_decoder = facts.encoder is not None
    runner.enable_two_batch_overlap = facts.two_batch is not None
    runner.enable_pdmux = False
    runner.model_runner = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_ngram=lambda: facts.tokens is not None),
        server_args=SimpleNamespace(speculative_verify_graph="auto"),
    )
    sizes = set(facts.sizes)
    runner.backend = SimpleNamespace(can_run=lambda _batch, key: key.size in sizes)
    import torch

    batch = SimpleNamespace(
        batch_size=facts.batch,
        replace_embeds=object() if facts.own_embeddings else None,
        forward_mode=Mode(),
        spec_info=SimpleNamespace(num_tokens_per_req=facts.width),
        original_global_num_tokens_cpu=[facts.of_ranks, 1] if facts.of_ranks is not None else None,
        can_run_dp_cuda_graph=bool(facts.ranks_ready),
        can_run_tbo=bool(facts.two_batch),
        encoder_lens=torch.tensor([1, 1, 1 if facts.encoder else 0]),
        input_ids=torch.zeros(facts.tokens or facts.batch * facts.captured_width),
        lora_ids=None,
    )
    return runner, batch


UNIFORM = tuple(row for row in TABLE if not {"ragged", "switched_off", "sizes"} & set(row.changes))


@pytest.mark.parametrize("row", UNIFORM, ids=lambda row: row.name)
def test_upstream_agrees(row: Row) -> None:
    """Every condition of upstream's predicate is in the table: both say no to the same batches."""
    facts = replace(GOOD, **row.changes)
    runner, batch = runner_and_batch(facts)
    assert bool(runner.can_run_graph(batch)) == (row.reason is None)
    read = why_eager(facts_of(runner, batch))
    assert (read.reason if read else None) == row.reason


def test_an_unexplained_refusal_is_named_as_such() -> None:
    runner, batch = runner_and_batch(GOOD)
    assert explain(runner, batch).reason == reasons.UNKNOWN
    assert "failed" in explain(SimpleNamespace(), batch).detail
