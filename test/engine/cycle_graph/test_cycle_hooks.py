"""The seam to upstream: relay hooks, sizes and ring of the graphs, the child-graph call, statistics."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import cycles
import pytest
import torch
from sglang.srt.speculative.cycle_graph import graphs as cycle_graphs
from sglang.srt.speculative.cycle_graph import hooks, kernels, steps
from sglang.srt.speculative.cycle_graph.buffers import RING
from sglang.srt.speculative.cycle_graph.driver import GraphError, add_child
from sglang.srt.speculative.cycle_graph.graphs import CycleGraphs, Entry, Launched
from sglang.srt.speculative.cycle_graph.wiring import Runners


class Event:
    """An event of a device that does all work at once."""

    def __init__(self) -> None:
        self.records = 0

    def record(self) -> None:
        self.records += 1


class FakeModule:
    """``torch.cuda`` for the publication."""

    Event = Event

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_event=self.waited.append)


def test_publication_by_the_graph_only_records_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    relay = SimpleNamespace(publish_ready=None, device="cuda", _publish_fresh=False)

    def never(*args: Any) -> None:
        raise AssertionError("upstream must not write the lengths again")

    hooks.publish(never, relay, torch.tensor([3]), hooks.RELAYED)
    assert relay.publish_ready.records == 1 and relay._publish_fresh and not module.waited
    hooks.publish(never, relay, torch.tensor([3]), hooks.RELAYED)
    assert relay.publish_ready.records == 2
    # An event recorded elsewhere in between stays part of what the next one means.
    assert module.waited == [relay.publish_ready]


def test_other_publications_and_stashes_are_upstreams() -> None:
    seen: list[Any] = []
    lengths, payload = torch.tensor([5]), SimpleNamespace(bonus_tokens=torch.tensor([1]))
    hooks.publish(lambda *args: seen.append(args), "relay", "rows", lengths)
    hooks.stash(lambda *args: seen.append(args), "relay", "rows", payload)
    assert seen == [("relay", "rows", lengths), ("relay", "rows", payload)]
    hooks.stash(lambda *args: seen.append(args), "relay", "rows", SimpleNamespace(bonus_tokens=hooks.RELAYED))
    assert len(seen) == 2


class Replayed:
    """A graph that runs the PyTorch glue."""

    def __init__(self, buffers: Any) -> None:
        self.buffers = buffers

    def replay(self) -> None:
        slot = int(self.buffers.control.state[1])
        self.buffers.results.lengths[slot].fill_(slot + 1)


def graphs_of_sizes(*sizes: int, exact: bool = False) -> CycleGraphs:
    made = CycleGraphs(3, exact)
    for size in sizes:
        buffers = cycles.make(cycles.Shape(batch=size, live=size), 1)
        made.add(Entry(buffers, Replayed(buffers)))  # type: ignore[arg-type]
    return made


def test_sizes() -> None:
    padded, exact = graphs_of_sizes(4, 1, 2), graphs_of_sizes(4, 1, 2, exact=True)
    assert [padded.size_for(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 0]
    assert [exact.size_for(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 0, 4, 0]
    assert CycleGraphs(3, False).size_for(1) == 0


def test_passes_captured_anew_are_noticed() -> None:
    def worker(verify: object) -> Any:
        return SimpleNamespace(
            draft_worker=SimpleNamespace(cuda_graph_runner=1, cuda_graph_runner_for_draft_extend=2),
            target_worker=SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=verify)),
        )

    first, second = object(), object()
    graphs = CycleGraphs(3, False, Runners.of(worker(first)))
    assert graphs.current(worker(first)) and not graphs.current(worker(second))


def test_results_of_two_cycles_in_flight_do_not_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", steps.load)
    graphs = graphs_of_sizes(1, 2)
    flight: list[Launched] = []
    for turn in range(3 * RING):
        flight.append(graphs.launch(torch.tensor([1, 2]), 0))
        for age, launched in enumerate(reversed(flight[-(RING - 1) :])):
            assert launched.lengths.tolist() == [(turn - age) % RING + 1] * 2
        assert flight[-1].tokens.shape == (6,) and flight[-1].lengths.shape == (2,)


def test_phases_are_the_spans_between_the_marks() -> None:
    marks = torch.tensor([0, 1_000_000, 4_000_000, 4_500_000, 4_400_000])
    empty = torch.empty(0, dtype=torch.int32)
    found = Launched(1, empty, empty, empty, marks).phases()
    # A clock that seems to run backwards gives nothing, not a negative time.
    assert found == {"verify": 3.0, "sample": 0.5, "draft_extend": 0.0}


class Driver:
    """The driver calls of a child graph, as far as a test needs them."""

    def __init__(self, status: int = 1, refuse: str = "") -> None:
        self.status, self.refuse = status, refuse
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name.startswith("cuStreamGetCaptureInfo"):
                ctypes.cast(args[1], ctypes.POINTER(ctypes.c_int))[0] = self.status
            return 1 if self.refuse and name.startswith(self.refuse) else 0

        return call


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))


def test_a_child_becomes_the_next_node(stream: None) -> None:
    driver, child = Driver(), SimpleNamespace(raw_cuda_graph=lambda: 11)
    add_child(child, driver)  # type: ignore[arg-type]
    names = [name.partition("_v")[0] for name in driver.calls]
    assert names == [
        "cuStreamGetCaptureInfo",
        "cuGraphAddChildGraphNode",
        "cuStreamUpdateCaptureDependencies",
    ]


@pytest.mark.parametrize(
    "driver",
    (
        Driver(status=0),
        Driver(refuse="cuStreamGetCaptureInfo"),
        Driver(refuse="cuGraphAddChildGraphNode"),
        Driver(refuse="cuStreamUpdateCaptureDependencies"),
    ),
)
def test_refusals_have_a_name(stream: None, driver: Driver) -> None:
    with pytest.raises(GraphError):
        add_child(SimpleNamespace(raw_cuda_graph=lambda: 11), driver)  # type: ignore[arg-type]


def test_a_failed_capture_leaves_the_server_on_three_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise GraphError("no")

    monkeypatch.setattr(hooks, "build", fail)
    graphs, admission = hooks._build(None, None)
    assert graphs is None and admission.reason == "capture failed: GraphError"
    assert cycle_graphs is not None


def step(device: str) -> tuple[Any, dict[str, int]]:
    from sglang.fork import fallbacks

    fallbacks.reset()
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False, is_decode=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=False)
    seen = hooks.cycle(lambda worker, batch, **kw: kw, SimpleNamespace(device=device), batch, on_publish="p")
    counts = fallbacks.snapshot().get("cycle-graph", {})
    fallbacks.reset()
    return seen, counts


def test_a_server_without_graphs_takes_upstreams_way_and_says_so_on_a_gpu() -> None:
    for device, counts in (("cuda", {"the scheduler has not started": 1}), ("cpu", {})):
        assert step(device) == ({"on_publish": "p", "grammar_barrier": None}, counts)


def test_buffers_of_another_shape_are_refused() -> None:
    import dataclasses

    buffers = cycles.make(cycles.Shape(), 0)
    for part, name, bad in (
        ("draft", "proposed", torch.zeros(3, 5)),
        ("verify", "tokens", torch.zeros(18)[::2]),
        ("verify", "logits", torch.zeros(8, 4)),
        ("extend", "hidden", torch.zeros(9, 3)),
    ):
        changed = dataclasses.replace(getattr(buffers, part), **{name: bad})
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(buffers, **{part: changed}).check()
