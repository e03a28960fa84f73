"""What the hooks do to upstream's objects, with stand-ins for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.fork import fallbacks
from sglang.srt.speculative.stats import collector as collectors
from sglang.srt.speculative.stats import export, graphs, hooks, metrics, paths
from sglang.srt.speculative.stats.accept import histogram_faults

SPEC = SimpleNamespace(is_none=lambda: False)
PLAIN = SimpleNamespace(is_none=lambda: True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A collector of its own for each test."""
    collectors.reset()
    yield
    collectors.reset()


def nothing(*_: Any, **__: Any) -> None:
    """An upstream method that does nothing."""


class Request:
    """A request as upstream's result processor leaves it after a verify."""

    def __init__(self, prompt: int = 3) -> None:
        self.origin_input_ids = list(range(prompt))
        self.output_ids: list[int] = [7]
        self.finished_len: int | None = None
        self.customized_info: dict[str, Any] | None = None
        self.spec_correct_drafts_histogram: list[int] = []
        self.spec_num_correct_drafts = 0
        self.spec_verify_ct = 0

    @property
    def output_ids_through_stop(self) -> list[int]:
        """Output without what lies behind the end."""
        return self.output_ids[: self.finished_len]

    def finished(self) -> bool:
        """Whether it ended."""
        return self.finished_len is not None

    def verified(self, accepted: int) -> None:
        """Upstream's own accounting of a verify."""
        self.output_ids += [9] * accepted
        self.spec_verify_ct += 1
        self.spec_num_correct_drafts += accepted - 1
        self.spec_correct_drafts_histogram += [0] * (accepted - len(self.spec_correct_drafts_histogram))
        self.spec_correct_drafts_histogram[accepted - 1] += 1


def settle(req: Request, accepted: int, finished_len: int | None = None) -> Any:
    """One verify of one request, through the hook; returns upstream's counters."""
    req.verified(accepted)
    req.finished_len = finished_len
    reporter = SimpleNamespace(
        spec_num_accept_tokens=accepted, spec_num_forward_ct=1, num_generated_tokens=accepted
    )
    result = SimpleNamespace(num_correct_drafts=accepted - 1, num_correct_drafts_per_req_cpu=[accepted - 1])
    batch = SimpleNamespace(spec_algorithm=SPEC, reqs=[req])
    hooks.settled(nothing, SimpleNamespace(metrics_reporter=reporter), req, batch, result, 0, None)
    return SimpleNamespace(reporter=reporter, result=result)


def test_end_of_text_as_first_of_three_counts_one() -> None:
    """vllm#56101: the mean acceptance length must be 1 here, not 3."""
    req = Request()
    seen = settle(req, accepted=3, finished_len=2)
    stats = collectors.collector()
    assert stats.kept.length == 1.0 and stats.tokens_past_end == 2
    assert seen.reporter.spec_num_accept_tokens / seen.reporter.spec_num_forward_ct == 1.0
    assert seen.reporter.num_generated_tokens == 1 and seen.result.num_correct_drafts == 0
    assert req.spec_correct_drafts_histogram == [1] and req.spec_num_correct_drafts == 0


@pytest.mark.parametrize("cut", [None, 5, 6, 7])
def test_identities_hold_after_the_cut(cut: int | None) -> None:
    """sglang#33518: sum(h) = verifies, sum(i h) = drafts, and the tokens add up."""
    req = Request()
    settle(req, accepted=3)
    settle(req, accepted=1)
    settle(req, accepted=3, finished_len=None if cut is None else cut + 1)
    tokens = len(req.output_ids_through_stop)
    if cut == 5:
        tokens = 6
    faults = histogram_faults(
        req.spec_correct_drafts_histogram, req.spec_verify_ct, req.spec_num_correct_drafts, tokens
    )
    assert faults == []


def test_a_batch_without_speculation_is_left_alone() -> None:
    req = Request()
    batch = SimpleNamespace(spec_algorithm=PLAIN, reqs=[req])
    hooks.settled(
        nothing, SimpleNamespace(), req, batch, SimpleNamespace(num_correct_drafts_per_req_cpu=None), 0, None
    )
    assert collectors.collector().kept.cycles == 0


def test_grammar_truncated_runs_count_what_was_retained() -> None:
    req = Request()
    req.verified(3)
    del req.output_ids[-1]
    result = SimpleNamespace(
        num_correct_drafts=2, num_correct_drafts_per_req_cpu=[2], grammar_retained_tokens=[[9, 9]]
    )
    reporter = SimpleNamespace(spec_num_accept_tokens=3, num_generated_tokens=3)
    batch = SimpleNamespace(spec_algorithm=SPEC, reqs=[req])
    hooks.settled(nothing, SimpleNamespace(metrics_reporter=reporter), req, batch, result, 0, None)
    assert collectors.collector().kept.counts == [0, 1]


def test_the_summary_rides_on_the_last_token_and_is_unpacked() -> None:
    req = Request()
    settle(req, accepted=3)
    settle(req, accepted=2, finished_len=6)
    assert req.customized_info is not None
    values = req.customized_info[hooks.SUMMARY_KEY]
    assert len(values) == 6 and values[:-1] == [None] * 5
    meta: dict[str, Any] = {
        hooks.SUMMARY_KEY: values,
        "spec_correct_drafts_histogram": req.spec_correct_drafts_histogram,
        "spec_verify_ct": 2,
    }
    hooks.meta_info(nothing, None, meta, None, 0)
    assert meta["spec_kept_length"] == 2.5
    assert meta["spec_kept_by_position"] == [1.0, 0.5]
    assert isinstance(meta[hooks.SUMMARY_KEY], dict)


def test_a_cycle_through_the_hooks() -> None:
    """The order in which upstream's worker calls them, and what a prefill in between does."""
    mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, reqs=[Request(), Request()])
    worker = SimpleNamespace(device="cpu")

    def step(_: Any, __: Any) -> str:
        hooks.verify(lambda *_: hooks.sample(nothing), None)
        hooks.draft_extend(nothing, None)
        return "result"

    for _ in range(3):
        assert hooks.cycle(step, worker, batch) == "result"
    prefill = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), is_extend_in_batch=False)
    hooks.cycle(nothing, worker, prefill)
    stats = collectors.collector()
    stats.read()
    assert stats.totals.counts == {"draft": 3, "verify": 3, "sample": 3, "draft_extend": 3, "host_gap": 2}
    assert stats.window.batch == 2


def test_a_failing_cycle_raises_and_leaves_no_trace() -> None:
    mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, reqs=[Request()])

    def broken(*_: Any) -> None:
        raise RuntimeError("upstream failed")

    with pytest.raises(RuntimeError, match="upstream failed"):
        hooks.cycle(broken, SimpleNamespace(device="cpu"), batch)
    stats = collectors.collector()
    stats.read()
    assert stats.totals.cycles == 0


def test_counter_names_become_metric_names() -> None:
    assert metrics.split_counter('graph_replays{kind="verify",why="a \\"b\\""}') == (
        "graph_replays",
        {"kind": "verify", "why": 'a \\"b\\"'},
    )
    assert metrics.split_counter("verify.splits") == ("verify_splits", {})


def test_metrics_are_published_as_differences() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    publisher = metrics.Publisher({"model_name": "tiny", "tp_rank": "0"})
    stats = collectors.Collector("cpu")
    for total in (3, 5):
        stats.settle(3)
        stats.settle(1)
        window = stats.take_window()
        window.phases.add({"verify": 2.0, "host_gap": 0.5})
        publisher.publish(
            window, None, stats.alarm, {"verify-attention": {"head dim": total}}, {"graph_replays": total}, 2
        )
    labels = {"model_name": "tiny", "tp_rank": "0"}

    def value(name: str, **more: str) -> float | None:
        found: float | None = prometheus.REGISTRY.get_sample_value(f"sglang:{name}", {**labels, **more})
        return found

    assert value("spec_fallbacks_total", path="verify-attention", reason="head dim") == 5
    assert value("spec_graph_replays_total") == 5
    assert value("spec_tokens_past_end_total") == 2
    assert value("spec_kept_length") == 2
    assert value("spec_kept_drafts_total", position="2") == 2
    assert value("spec_phase_ms", phase="verify") == 2
    assert value("spec_phase_seconds_total", phase="host_gap") == pytest.approx(0.001)


def test_the_snapshot_is_plain_data() -> None:
    import json

    json.dumps(export.snapshot(collectors.collector(), SimpleNamespace()))


class Mode:
    """A capture mode."""

    def __init__(self, verify: bool) -> None:
        self._verify = verify

    def is_target_verify(self) -> bool:
        """Whether a verify is captured."""
        return self._verify


class DecodeCudaGraphRunner:
    """A runner that captured up to 4 requests of 3 tokens."""

    capture_forward_mode = Mode(True)
    captured_req_width, max_bs, disable_padding = 3, 4, False


class EAGLEDraftExtendCudaGraphRunner(DecodeCudaGraphRunner):
    """The draft extend's."""


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"batch_size": 5}, "the batch is above the largest captured one", "--cuda-graph-max-bs"),
        (
            {"batch_size": 1, "spec_info": SimpleNamespace(num_tokens_per_req=2)},
            "tokens a request differ",
            "captured 3",
        ),
        ({"batch_size": 1, "replace_embeds": object()}, "embeddings", ""),
        ({"batch_size": 3}, "needs what the graph does not hold", "batch 3"),
    ],
)
def test_a_batch_off_its_graph_is_counted_with_its_reason(
    changes: dict[str, Any], reason: str, remedy: str
) -> None:
    """sglang#33483: passing the largest captured batch must be said, counted and exported."""
    batch = SimpleNamespace(**{"replace_embeds": None, "spec_info": None, **changes})
    log = collectors.collector().graphs
    fallbacks.reset()
    log.begin()
    for _ in range(2):  # upstream asks twice
        assert hooks.may_replay(lambda *_: False, DecodeCudaGraphRunner(), batch) is False
    hooks.replayed(nothing, EAGLEDraftExtendCudaGraphRunner())
    log.end(("verify", "draft_extend"))
    assert log.eager == {"verify": 1} and log.replays == {"draft_extend": 1}
    (found,) = fallbacks.snapshot()["cuda graph of verify"]
    assert reason in found
    assert remedy in graphs.why_not(DecodeCudaGraphRunner(), batch)[1]


def test_an_exact_size_with_padding_off_names_the_list() -> None:
    """sglang#30746."""
    runner = DecodeCudaGraphRunner()
    runner.disable_padding = True
    batch = SimpleNamespace(batch_size=3, replace_embeds=None, spec_info=None)
    assert "--cuda-graph-bs" in graphs.why_not(runner, batch)[1]


def test_plans_and_all_reduce_are_named() -> None:
    request = SimpleNamespace(kind="mla", batch=1, tokens=3)
    plan = SimpleNamespace(reason="hopper 64x32, 132 items", use=True, items=132)
    refused = SimpleNamespace(reason="q rows 1000 are above 64")
    decisions = {
        Frozen(request): (None, plan),
        Frozen(SimpleNamespace(kind="gqa", batch=2, tokens=9)): (refused, None),
    }
    backend = SimpleNamespace(fork_verify_binding=SimpleNamespace(decisions=decisions))
    ranks = SimpleNamespace(world_size=8, ca_comm=None, pynccl_comm=SimpleNamespace(disabled=False))
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
        draft_worker=None,
        tp_group=ranks,
    )
    plans = paths.kv_plans(scheduler)
    assert [(entry["used"], entry["items"]) for entry in plans] == [(True, 132), (False, 0)]
    assert "above 64" in plans[1]["reason"]
    assert paths.all_reduce(scheduler).startswith("8 ranks: pynccl in graphs")
    assert paths.all_reduce(SimpleNamespace()) == "none: one rank"


def test_the_one_shot_all_reduce_is_named_first() -> None:
    """With the names that its package uses: a rename there fails here."""
    from sglang.srt.distributed.one_shot import communicator, hooks

    assert (paths.ONE_SHOT, paths.ONE_SHOT_PATH) == (hooks._ATTRIBUTE, communicator.PATH)
    group = SimpleNamespace(world_size=2, pynccl_comm=SimpleNamespace(disabled=False))
    scheduler = SimpleNamespace(tp_group=group)
    setattr(
        group, hooks._ATTRIBUTE, SimpleNamespace(calls={("plain", "one_shot"): 3, ("fused", "one_shot"): 61})
    )
    assert paths.all_reduce(scheduler).startswith(
        "2 ranks: one-shot where its table says so (launches: fused one_shot 61, plain one_shot 3), then pynccl"
    )
    setattr(group, hooks._ATTRIBUTE, None)
    assert "one-shot" not in paths.all_reduce(scheduler)
    fallbacks.record(communicator.PATH, "no peer access")
    assert paths.all_reduce(scheduler).endswith("; no one-shot: no peer access")


class Frozen:
    """Makes a namespace usable as a key."""

    def __init__(self, inner: SimpleNamespace) -> None:
        self.kind, self.batch, self.tokens = inner.kind, inner.batch, inner.tokens
