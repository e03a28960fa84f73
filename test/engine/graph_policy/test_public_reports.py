"""Public bug reports, each as a test named after it."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.fork import counters, fallbacks
from sglang.srt.speculative.graph_policy import capture, flags, sizes, steps
from sglang.srt.speculative.graph_policy.reasons import Facts, why_eager
from sglang.srt.speculative.graph_policy.room import ModelFacts
from sglang.srt.speculative.stats.graphs import GraphLog

KIMI = ModelFacts(hidden=7168, vocabulary=163840, layers=61, kept_hidden=3, attention_row_bytes=4 << 20)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """No counts from elsewhere."""
    for module in (counters, fallbacks, capture):
        module.reset()
    yield
    for module in (counters, fallbacks, capture):
        module.reset()


def test_sglang_30746_exact_sizes_replay_with_padding_off() -> None:
    """C1: with padding off 1, 2 and 4 replay, 3 is eager and counted."""
    facts = Facts(batch=1, sizes=(1, 2, 4), captured_width=3, padding=False)
    answers = {size: why_eager(replace(facts, batch=size)) for size in (1, 2, 3, 4)}
    assert [size for size, why in answers.items() if why is None] == [1, 2, 4]
    assert answers[3] is not None
    steps.eager("verify", answers[3])
    (key,) = counters.snapshot()
    assert 'kind="verify"' in key and "padding is off" in key
    gap = sizes.find_gap((1, 2, 4), 4, padding=False)
    assert gap is not None and gap.missing == ((3, 3),) and "--cuda-graph-bs-decode" in gap.reason


def test_sglang_33483_passing_the_largest_captured_batch_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """C2: 5 requests on graphs that end at 2; warned once, counted every step, exported with its reason."""
    log = GraphLog()
    why = why_eager(Facts(batch=5, sizes=(1, 2), captured_width=3))
    assert why is not None
    with caplog.at_level(logging.WARNING, "sglang.fork"):
        for _ in range(100):
            log.begin()
            log.refuse("verify", why.reason, why.detail)
            log.end(("verify",))
    warned = [record for record in caplog.records if "verify" in record.getMessage()]
    assert len(warned) == 1 and "--cuda-graph-max-bs-decode" in warned[0].getMessage()
    assert set(counters.snapshot().values()) == {100}


def test_sglang_33483_the_gap_is_named_at_start(caplog: pytest.LogCaptureFixture) -> None:
    """C2: the list ends at 8 and 48 requests run; a chosen list is named, a default one is closed."""
    setup = flags.Setup("auto", True, "cuda", "full", (1, 2, 4, 8), 48)
    gap = flags.gap_of(setup)
    assert gap is not None and gap.missing == ((9, 48),) and "48" in gap.text()
    assert flags.grown(setup, chosen=True) is None
    grown = flags.grown(setup, chosen=False)
    assert grown is not None and grown[-1] == 48 and set(setup.sizes) < set(grown)
    assert flags.gap_of(replace(setup, sizes=grown)) is None
    with caplog.at_level(logging.WARNING, "sglang.fork.graphs"):
        flags.check(arguments(setup, chosen=True))
    assert "batches 9-48 have no graph" in caplog.text


def test_vllm_27325_sizes_count_requests() -> None:
    """C3: 8 requests of 3 draft tokens are 24 rows."""
    kinds = {
        plan.kind: plan for plan in sizes.plan((1, 2, 4, 8), 8, draft_tokens=3, steps=2, topk=1, decode=True)
    }
    assert kinds["verify"].rows == (3, 6, 12, 24) and kinds["verify"].sizes == (1, 2, 4, 8)
    assert kinds["draft_extend"].largest_rows == 24
    assert kinds["decode"].largest_rows == kinds["draft"].largest_rows == 8
    assert "24 rows" in kinds["verify"].text()


@pytest.mark.parametrize("wrapped", [False, True])
def test_sglang_2863_out_of_memory_names_the_need_and_the_flags(wrapped: bool) -> None:
    """C7: capturing draft graphs without memory says how much was needed and what to lower."""
    plan = sizes.KindPlan("draft", 1, (1, 2, 4, 48))

    def work() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        except torch.OutOfMemoryError as error:
            if wrapped:  # upstream wraps in a bare Exception
                raise Exception(f"Capture cuda graph failed: {error}") from None
            raise

    with pytest.raises(capture.CaptureOutOfMemory) as caught:
        capture.watched(plan, KIMI, lambda: 100 << 20, work)
    text = str(caught.value)
    for part in ("draft", "GB", "0.10 GB were free", "--mem-fraction-static", "--cuda-graph-max-bs-decode"):
        assert part in text


def test_another_error_of_a_capture_stays_itself() -> None:
    """Negative control of C7: only missing memory is renamed."""

    def work() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture.watched(sizes.KindPlan("verify", 3, (1,)), KIMI, lambda: 1 << 40, work)
    assert not capture.captured()


def test_sglang_10088_seconds_of_each_kind_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """C10: one line a kind with sizes, memory and seconds; the same for the doctor."""
    free = iter((10 << 30, 9 << 30))
    with caplog.at_level(logging.INFO, "sglang.fork.graphs"):
        capture.watched(sizes.KindPlan("verify", 3, (1, 2)), KIMI, lambda: next(free), lambda: None)
    line = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert len(line) == 1 and "sizes 1 2" in line[0] and "1.07 GB" in line[0] and " s" in line[0]
    assert capture.describe() == [("graphs of verify", line[0])]
    assert capture.state()["verify"]["rows"] == [3, 6]


def test_room_is_counted_before_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    """Too little memory is said before anything is captured, by kind and with the flags."""
    seen: list[str] = []

    def work() -> None:
        seen.extend(record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.INFO, "sglang.fork.graphs"):
        capture.watched(sizes.KindPlan("verify", 3, (1, 48)), KIMI, lambda: 1 << 20, work)
    assert any("need about" in text and "--mem-fraction-static" in text for text in seen)


def arguments(setup: flags.Setup, *, chosen: bool) -> Any:
    """``ServerArgs`` as far as the check reads them."""
    return SimpleNamespace(
        speculative_verify_graph=setup.mode,
        speculative_algorithm="EAGLE3" if setup.speculates else None,
        device=setup.device,
        cuda_graph_config=SimpleNamespace(
            decode=SimpleNamespace(
                backend=setup.backend, bs=list(setup.sizes), max_bs=max(setup.sizes, default=0)
            )
        ),
        max_running_requests=setup.most_running,
        disable_cuda_graph_padding=not setup.padding,
        enable_dp_attention=setup.dp_attention,
        dp_size=1,
        enable_two_batch_overlap=setup.two_batch,
        _cuda_graph_config_locked={("decode", "bs")} if chosen else set(),
    )
