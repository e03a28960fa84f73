"""``--speculative-verify-graph``: what it refuses at start, what at run time, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.speculative.arguments.faults import ArgumentFault
from sglang.srt.speculative.graph_policy import capture, flags, hooks, sizes
from sglang.srt.speculative.graph_policy.policy import VerifyGraphRequired
from sglang.srt.speculative.graph_policy.reasons import NOT_CAPTURED, OFF, Eager
from sglang.srt.speculative.graph_policy.room import ModelFacts, estimate
from test_reasons import GOOD, runner_and_batch

FULL = flags.Setup("require", True, "cuda", "full", (1, 2, 4, 8), 8)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, None, ""),
        ({"mode": "auto", "backend": "disabled", "sizes": ()}, None, ""),
        ({"mode": "off", "backend": "disabled", "sizes": ()}, None, ""),
        ({"mode": "always"}, "mode", "auto, require, off"),
        ({"speculates": False}, "verify-graph-no-draft", "--speculative-algorithm"),
        ({"device": "cpu"}, "verify-graph-cpu", "CPU"),
        ({"backend": "disabled"}, "verify-graph-disabled", "--disable-cuda-graph"),
        ({"dp_attention": True}, "verify-graph-dp-attention", "--enable-dp-attention"),
        ({"two_batch": True}, "verify-graph-two-batch", "--enable-two-batch-overlap"),
        ({"most_running": 48}, "verify-graph-gap", "batches 9-48"),
        ({"most_running": None}, None, ""),
        ({"padding": False}, "verify-graph-gap", "batches 3, 5-7"),
        ({"padding": False, "sizes": tuple(range(1, 9))}, None, ""),
    ],
)
def test_require_refuses_to_start(changes: dict[str, Any], code: str | None, words: str) -> None:
    fault = flags.refusal(replace(FULL, **changes))
    assert (fault.code if fault else None) == code
    if fault is not None:
        assert words in str(fault) and flags.FLAG in str(fault)


def test_require_refuses_to_run_eager() -> None:
    runner, batch = runner_and_batch(replace(GOOD, batch=9))
    runner.model_runner.server_args.speculative_verify_graph = "require"
    with pytest.raises(VerifyGraphRequired, match="batch 9, largest 8"):
        hooks.may_replay(lambda *_: False, runner, batch)
    assert hooks.may_replay(lambda *_: True, runner, batch) is True


def test_require_leaves_other_passes_alone() -> None:
    """The draft may run eager: the flag is about verify."""
    runner, batch = runner_and_batch(replace(GOOD, batch=9))
    runner.model_runner.server_args.speculative_verify_graph = "require"
    runner.capture_forward_mode = SimpleNamespace(is_target_verify=lambda: False)
    assert hooks.may_replay(lambda *_: False, runner, batch) is False


def test_auto_lets_a_verify_run_eager() -> None:
    runner, batch = runner_and_batch(replace(GOOD, batch=9))
    assert hooks.may_replay(lambda *_: False, runner, batch) is False


class FakeRunner:
    """A target's ``ModelRunner`` as far as the capture hook reads it."""

    def __init__(self, mode: str, backend: str = "full", sizes_: tuple[int, ...] = (1, 2)) -> None:
        self.server_args = SimpleNamespace(
            speculative_verify_graph=mode,
            cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=backend, bs=list(sizes_))),
        )
        self.spec_algorithm = SimpleNamespace(is_speculative=lambda: True, is_none=lambda: False)
        self.device, self.is_draft_worker, self.is_generation = "cuda", False, True


def captured_when_asked(*, model_runner: Any) -> Any:
    """Upstream's function: captures unless the model does not generate or graphs are disabled."""
    config = model_runner.server_args.cuda_graph_config.decode
    nothing = not model_runner.is_generation or config.backend == "disabled"
    return SimpleNamespace(runner=None if nothing else object())


def test_off_captures_no_verify_graph() -> None:
    runner = FakeRunner("off")
    capture.reset()
    assert hooks.capture_target(captured_when_asked, model_runner=runner).runner is None
    assert runner.is_generation and capture.why_absent("verify").reason == OFF
    assert capture.why_absent("draft").reason == NOT_CAPTURED
    capture.reset()


def test_disabled_graphs_say_which_flag() -> None:
    capture.reset()
    hooks.capture_target(captured_when_asked, model_runner=FakeRunner("auto", backend="disabled"))
    assert "--disable-cuda-graph" in capture.why_absent("draft_extend").detail
    capture.reset()


def test_a_cpu_is_left_alone() -> None:
    runner = FakeRunner("require")
    runner.device = "cpu"
    assert hooks.capture_target(lambda **_: "stock", model_runner=runner) == "stock"


def test_the_exception_crosses_processes_with_its_text() -> None:
    text = str(VerifyGraphRequired(Eager("reason", "detail")))
    assert "reason (detail)" in text and "--speculative-verify-graph auto" in text


@given(
    st.sets(st.integers(1, 300), min_size=1, max_size=20),
    st.integers(1, 300),
    st.booleans(),
)
def test_grown_sizes_leave_no_gap(captured: set[int], running: int, padding: bool) -> None:
    grown = sizes.grow(captured, running, padding=padding)
    assert captured <= set(grown)
    assert sizes.find_gap(grown, running, padding=padding) is None
    if padding:
        assert len(grown) <= len(captured) + sizes.MOST_ADDED + 1


@given(st.sets(st.integers(1, 64), max_size=12), st.integers(1, 64), st.booleans())
def test_a_gap_is_exactly_what_no_graph_serves(captured: set[int], running: int, padding: bool) -> None:
    gap = sizes.find_gap(captured, running, padding=padding)
    missing = {size for low, high in (gap.missing if gap else ()) for size in range(low, high + 1)}
    clamped = sizes.clamp(captured, running)
    for batch in range(1, running + 1):
        served = any(size >= batch for size in clamped) if padding else batch in clamped
        assert served == (batch not in missing)


@given(st.sets(st.integers(1, 64), min_size=1, max_size=12), st.integers(1, 8))
def test_an_estimate_grows_with_every_size_and_width(captured: set[int], width: int) -> None:
    model = ModelFacts(hidden=64, vocabulary=128, layers=2, kept_hidden=3, attention_row_bytes=100)
    plan = sizes.KindPlan("verify", width, tuple(sorted(captured)))
    more = sizes.KindPlan("verify", width, (*plan.sizes, plan.sizes[-1] + 1))
    wider = sizes.KindPlan("verify", width + 1, plan.sizes)
    assert 0 < estimate(plan, model).total < estimate(more, model).total
    assert estimate(plan, model).total < estimate(wider, model).total
    assert estimate(sizes.KindPlan("verify", width, ()), model).total == 0


def test_an_argument_fault_names_the_flag() -> None:
    fault = flags.refusal(replace(FULL, backend="disabled"))
    assert isinstance(fault, ArgumentFault) and str(fault).startswith("--speculative-verify-graph require")
