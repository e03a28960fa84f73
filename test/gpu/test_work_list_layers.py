"""The work list of a forward pass on a device: many layers of one graph read it while lengths change between replays."""

from __future__ import annotations

from dataclasses import replace

import checks
import paged
import pytest
import torch
from paged import Batch, Case, error
from sglang.srt.layers.attention.verify import fused_driver
from sglang.srt.layers.attention.verify.plan import SplitPlan, device_traits
from sglang.srt.layers.attention.verify.work_list import PassList

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a device of capability 9.0",
    ),
]
BF16 = torch.bfloat16
LAYERS, ROUNDS = 6, 3


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = replace(device_traits(), fused="no", warpgroup="always")
    monkeypatch.setattr(paged, "device_traits", lambda: traits)


def lengths_of(batch: int, turn: int) -> tuple[int, ...]:
    """Lengths of a replay, 0 for padding: each request's change by up to 100x, and so does its neighbour's share."""
    if batch == 1:
        return ((300,), (30011,), (3,))[turn]
    longest = 30011 if batch < 8 else 3001
    found = [(3, longest // 100, longest)[(i + turn) % 3] + 7 * i for i in range(batch)]
    if batch > 2:
        found[(5 * turn + 1) % batch] = found[(3 * turn + 2) % batch] = 0
    return tuple(found)


class Model:
    """A batch with a cache for each of some layers; lengths are written by the kernel in front of the first."""

    def __init__(self, batch: int, tokens: int, wide: bool) -> None:
        self.rounds = [lengths_of(batch, turn) for turn in range(ROUNDS)]
        longest = tuple(max(column) for column in zip(*self.rounds, strict=True))
        self.case = Case("layers", dtype=BF16, tokens=tokens, lengths=longest)
        self.batch = Batch(self.case, "cuda")
        if wide:
            self.batch.table = self.batch.table.long()
        else:
            self.batch.seq_lens, self.batch.req = self.batch.seq_lens.int(), self.batch.req.int()
        self.pools = [self.batch.k_pool * (1 + layer / 8) for layer in range(LAYERS)]
        self.plan: SplitPlan = self.batch.plan(max(longest) + 7)
        assert self.plan.tile.kernel == "warpgroup"
        self.space = self.batch.workspace(self.plan)
        self.slots, self.staged = self.batch.slots, self.batch.seq_lens.clone()
        rows = batch * tokens
        self.outs = torch.empty(LAYERS, rows, self.case.heads, 512, dtype=BF16, device="cuda")
        self.lses = torch.empty(LAYERS, rows, self.case.heads, device="cuda")

    def turn(self, lengths: tuple[int, ...]) -> None:
        """The next forward pass has these lengths."""
        self.staged.copy_(torch.tensor([n - self.case.tokens for n in lengths]))
        self.batch.slots = [s[:n] for s, n in zip(self.slots, lengths, strict=True)]
        self.batch.case = replace(self.case, lengths=lengths)

    def forward(self, work: PassList | None, listed: bool = True) -> None:
        """A forward pass; a list of its own if none is given."""
        self.batch.seq_lens.copy_(self.staged)
        self.batch.work = (work or PassList()) if listed else None
        for layer, pool in enumerate(self.pools):
            self.batch.k_pool = pool
            self.batch.launch(self.plan, self.space, self.outs[layer], self.lses[layer])
        if listed and work is None:
            assert self.batch.work is not None and self.batch.work.written == 1

    def captured(self, work: PassList | None = None) -> torch.cuda.CUDAGraph:
        """A graph of a forward pass, captured on the stream of a warm-up run."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward(work)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.forward(work)
        return graph

    def check(self, graph: torch.cuda.CUDAGraph, replays: int) -> None:
        """Every replay equals, bit by bit, an eager pass whose blocks find their work themselves; the last layer the oracle."""
        for lengths in self.rounds:
            self.turn(lengths)
            self.forward(None, listed=False)
            want = self.outs.clone(), self.lses.clone()
            for _ in range(replays):
                self.outs.fill_(float("nan"))
                self.lses.fill_(float("nan"))
                self.space.poison()
                graph.replay()
                assert torch.equal(self.outs, want[0]) and torch.equal(self.lses, want[1]), lengths
            if max(lengths) * len(lengths) <= 100_000:
                oracle, _ = self.batch.expected()
                assert error(self.outs[-1], oracle) < checks.TOLERANCE[BF16], lengths


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("batch", [1, 2, 4, 7, 8, 32, 64])
def test_layers_of_a_graph_share_a_list_while_lengths_change(batch: int, tokens: int, wide: bool) -> None:
    model = Model(batch, tokens, wide)
    model.turn(model.rounds[0])
    model.check(model.captured(), 20)


def test_two_graphs_and_an_eager_pass_take_turns() -> None:
    small, large = Model(2, 3, False), Model(8, 3, False)
    graphs = []
    for model in (large, small):
        model.turn(model.rounds[0])
        graphs.append(model.captured())
    for _ in range(3):
        for model, graph in zip((large, small), graphs, strict=True):
            model.check(graph, 1)


def test_control_a_graph_without_its_list_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that takes the warm-up's list for its own: right until lengths change."""
    monkeypatch.setattr(fused_driver, "capture_of", lambda stream: 0)
    monkeypatch.setattr("sglang.srt.layers.attention.verify.work_list._identity", lambda tensor: None)
    model, work = Model(2, 3, False), PassList()
    model.turn(model.rounds[0])
    graph = model.captured(work)
    assert work.written == 1
    checks.must_fail(lambda: model.check(graph, 1))
