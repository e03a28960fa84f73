"""The projection made ahead: what it computes, when it forks and joins, and what a server does around its captures."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.cycle_graph import graphs as cycle_graphs
from sglang.srt.speculative.cycle_graph.ahead import branch as branches
from sglang.srt.speculative.cycle_graph.ahead import start
from sglang.srt.speculative.cycle_graph.ahead.branch import Branch, last_layer
from sglang.srt.speculative.cycle_graph.ahead.projection import Projection, projection_of
from sglang.srt.speculative.cycle_graph.wiring import Runners
from torch import nn

HIDDEN, STATES, ROWS = 19, 3, 3


class Scale(nn.Module):
    """A norm, as far as these tests care: another function for every instance."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def draft(**parts: Any) -> Any:
    inner = nn.Module()
    inner.config = SimpleNamespace(hidden_size=HIDDEN)  # type: ignore[assignment]
    for name, part in ({"fc": nn.Linear(HIDDEN * STATES, HIDDEN, bias=False)} | parts).items():
        setattr(inner, name, part)
    return SimpleNamespace(model=inner)


NORMS = [Scale(2.0), Scale(3.0), Scale(-1.0)]


@pytest.mark.parametrize(
    ("parts", "factors"),
    [
        ({}, (1.0, 1.0, 1.0)),
        ({"fc": nn.Linear(HIDDEN * STATES, HIDDEN)}, (1.0, 1.0, 1.0)),
        ({"input_norm": Scale(0.5)}, (0.5, 0.5, 0.5)),
        ({"input_norm": None, "fc_norm": nn.ModuleList(NORMS)}, (2.0, 3.0, -1.0)),
        ({"input_norm": Scale(0.5), "fc_norm": nn.ModuleList(NORMS)}, (1.0, 1.5, -0.5)),
    ],
)
def test_projection_is_what_the_draft_computes(parts: dict[str, Any], factors: tuple[float, ...]) -> None:
    model = draft(**parts)
    projection, reason = projection_of(model, HIDDEN * STATES)
    assert projection is not None and reason == ""
    packed = torch.randn(ROWS, HIDDEN * STATES)
    out = torch.full((ROWS, HIDDEN), float("nan"))
    projection.into(packed, out, 1)
    scaled = packed * torch.tensor(factors).repeat_interleave(HIDDEN)
    assert torch.equal(out, model.model.fc(scaled).detach())


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SimpleNamespace(), "no projection"),
        (draft(fc=None), "no projection"),
        (draft(fc=Packed()), "quantised"),
        (draft(fc=nn.Linear(HIDDEN * STATES, HIDDEN // 2)), "divided over the ranks"),
        (draft(fc=nn.Linear(HIDDEN, HIDDEN)), "divided over the ranks"),
    ],
)
def test_projections_that_cannot_be_made_ahead(model: Any, words: str) -> None:
    found, reason = projection_of(model, HIDDEN * STATES)
    assert found is None and words in reason


class Mode:
    def __init__(self, verify: bool) -> None:
        self.verify = verify

    def is_target_verify(self) -> bool:
        return self.verify


class Packer:
    """Collects states in one buffer, as a target of upstream's may."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, 0
        self.buffer = torch.full((0,), float("nan"))

    def append(self, state: torch.Tensor) -> None:
        if self.seen == 0:
            self.buffer = torch.full((state.shape[0], state.shape[1] * self.count), float("nan"))
        self.buffer[:, self.seen * HIDDEN : (self.seen + 1) * HIDDEN] = state
        self.seen += 1

    def __len__(self) -> int:
        return self.seen

    def finalize(self) -> torch.Tensor:
        assert self.seen == self.count
        return self.buffer


class Attention(nn.Module):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x * 1.25 + 0.5


class Layer(nn.Module):
    """Hands over what it is given, then changes it in place, as fused residual adds do."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        if attends:
            self.self_attn = Attention()
        self.attends = attends

    def forward(self, batch: Any, x: torch.Tensor, captured_last_layer_outputs: Any = None) -> torch.Tensor:
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.append(x.clone())
        return self.self_attn(x=x) if self.attends else x * 1.25 + 0.5


class Target(nn.Module):
    def __init__(self, layers: int = 7, captured: tuple[int, ...] = (1, 3, 5), attends: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attends) for _ in range(layers))
        self.layers_to_capture = list(captured)
        self.events: list[str] = []

    def forward(self, x: torch.Tensor, verify: bool = True, packer: bool = True) -> torch.Tensor:
        states: Any = Packer(len(self.layers_to_capture)) if packer else []
        batch = SimpleNamespace(forward_mode=Mode(verify))
        for i, layer in enumerate(self.layers):
            self.events.append(f"layer {i}")
            x = layer(batch, x, captured_last_layer_outputs=states if i in self.layers_to_capture else None)
        packed = states.finalize() if packer else torch.cat(states, dim=-1)
        assert isinstance(packed, torch.Tensor)
        return packed


def made(target: Target, rows: int = ROWS) -> tuple[Branch, Projection, list[Any]]:
    projection, _ = projection_of(draft(), HIDDEN * STATES)
    assert projection is not None
    found = Branch(projection, rows, STATES, torch.float32, "cpu", 4)
    found.projected.fill_(float("nan"))
    layer, states = last_layer(target)
    assert states == STATES
    tails: list[Any] = []
    found.install(layer, tails)
    return found, projection, tails


@pytest.mark.parametrize("attends", (True, False))
@pytest.mark.parametrize("packer", (True, False))
def test_branch_leaves_the_projection_of_the_packed_states(attends: bool, packer: bool) -> None:
    target = Target(attends=attends)
    branch, projection, tails = made(target)
    for cycle in range(3):
        packed = target(torch.randn(ROWS, HIDDEN) + cycle, packer=packer)
        for tail in tails:
            tail(None, None, None, ROWS)
        expected = torch.empty(ROWS, HIDDEN)
        projection.into(packed, expected, 1)
        assert torch.equal(branch.projected, expected)
    assert branch.joined == {ROWS}


def test_control_without_the_hooks_nothing_is_projected() -> None:
    target = Target()
    branch, _, tails = made(target)
    branch.remove()
    target(torch.randn(ROWS, HIDDEN))
    assert tails == [] and torch.isnan(branch.projected).all() and branch.joined == set()
    for module in target.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks


@pytest.mark.parametrize(("rows", "verify"), ((ROWS, False), (ROWS + 1, True)))
def test_other_passes_and_larger_ones_are_left_alone(rows: int, verify: bool) -> None:
    target = Target()
    branch, _, tails = made(target)
    target(torch.randn(rows, HIDDEN), verify=verify)
    tails[0](None, None, None, rows)
    assert torch.isnan(branch.projected).all() and branch.joined == set()


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


def streamed(monkeypatch: pytest.MonkeyPatch, target: Target, branch: Branch) -> list[str]:
    log = target.events
    main, side = Stream("main", log), Stream("side", log)

    @contextmanager
    def inside(stream: Stream) -> Any:
        log.append(f"on {stream.name}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    branch.stream = side
    return log


def test_forks_in_the_last_layer_that_leaves_a_state_and_joins_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target()
    branch, _, tails = made(target)
    log = streamed(monkeypatch, target, branch)
    target(torch.randn(ROWS, HIDDEN))
    # What the other stream still reads must not be handed out again.
    assert [item.shape for item in branch._held if isinstance(item, torch.Tensor)] == [
        (ROWS, HIDDEN * STATES)
    ]
    tails[0](None, None, None, ROWS)
    assert branch._held == []
    # One layer later than it starts, and one before the target's end.
    assert log[5:] == ["layer 5", "side waits for main", "on side", "back", "layer 6", "main waits for side"]


def test_a_pass_without_an_end_hook_is_settled_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    branch, _, tails = made(target)
    log = streamed(monkeypatch, target, branch)
    target(torch.randn(ROWS, HIDDEN))
    log.clear()
    target(torch.randn(ROWS, HIDDEN), verify=False)
    assert log.count("host waits for side") == 1
    log.clear()
    tails[0](None, None, None, ROWS)
    # A join with a stream that no fork of this pass led to would end a capture.
    assert log == []


@pytest.mark.parametrize("captured", ((), (1, 3, 7)))
def test_targets_without_a_layer_behind_the_last_state(captured: tuple[int, ...]) -> None:
    assert last_layer(Target(captured=captured)) == (None, 0)


def scheduler(target: Target, **changes: Any) -> Any:
    runner = SimpleNamespace(model=target, capture_tail_hooks=[])
    drafter = SimpleNamespace(
        draft_runner=SimpleNamespace(model=draft(), model_config=SimpleNamespace(dtype=torch.float32)),
        cuda_graph_runner_for_draft_extend=object(),
    )
    worker = SimpleNamespace(
        device="cuda", target_worker=SimpleNamespace(model_runner=runner), draft_worker=drafter,
        speculative_num_draft_tokens=ROWS,
    )  # fmt: skip
    return SimpleNamespace(draft_worker=SimpleNamespace(**(vars(worker) | changes)))


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch and the second draft extend without a GPU."""
    from sglang.srt.speculative import eagle_utils

    real = branches.Branch.__init__

    def init(
        self: Branch, projection: Any, rows: int, states: int, dtype: Any, device: Any, programs: int
    ) -> None:
        real(self, projection, rows, states, dtype, "cpu", programs)

    @contextmanager
    def nothing(drafter: Any) -> Any:
        yield

    monkeypatch.setattr(branches.Branch, "__init__", init)
    monkeypatch.setattr(start, "as_draft", nothing)
    monkeypatch.setattr(eagle_utils, "get_draft_input_from_target_hidden_dim", lambda runner: HIDDEN * STATES)
    monkeypatch.setattr(
        start, "capture_extend",
        lambda drafter, projected, rows: SimpleNamespace(capture_bs=[1], captured_req_width=ROWS, of=projected),
    )  # fmt: skip


def test_a_server_captures_with_the_branch_in_place(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> None:
    monkeypatch.setenv(start.SETTING, "7")
    target = Target()
    server = scheduler(target)
    tails = server.draft_worker.target_worker.model_runner.capture_tail_hooks

    def original(owner: Any) -> str:
        assert owner is server
        for rows in (2 * ROWS, ROWS):
            target(torch.randn(rows, HIDDEN))
            for tail in tails:
                tail(None, None, None, rows)
        return "captured"

    assert start.captured(original, server) == "captured"
    found = start.ahead_of(server.draft_worker)
    assert found is not None and found.rows == {ROWS} and found.extend.of is found.projected
    assert tails == [] and not any(module._forward_hooks for module in target.modules())
    stock = Runners("draft", "verify", "extend")
    chosen, projected = cycle_graphs.passes_of(stock, found, ROWS)
    assert chosen.extend is found.extend and chosen.verify == "verify" and projected is found.projected
    assert cycle_graphs.passes_of(stock, found, 2 * ROWS) == (stock, None)
    assert cycle_graphs.passes_of(stock, None, ROWS) == (stock, None)


def fail(*unused: Any) -> Any:
    raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("setting", "changes", "captured"),
    [
        ("", {}, (1, 3, 5)),
        ("0", {}, (1, 3, 5)),
        ("9", {"device": "cpu"}, (1, 3, 5)),
        ("9", {}, ()),
        ("9", {"speculative_num_draft_tokens": 5}, (1, 3, 5)),
        ("9", {"speculative_num_draft_tokens": None}, (1, 3, 5)),
    ],
)
def test_a_server_without_a_branch_captures_as_ever(
    monkeypatch: pytest.MonkeyPatch,
    on_a_cpu: None,
    setting: str,
    changes: dict[str, Any],
    captured: tuple[int, ...],
) -> None:
    monkeypatch.setenv(start.SETTING, setting)
    server = scheduler(Target(captured=captured), **changes)
    assert start.captured(lambda owner: "captured", server) == "captured"
    assert start.ahead_of(server.draft_worker) is None


def test_a_failed_second_capture_leaves_the_first(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> None:
    monkeypatch.setenv(start.SETTING, "9")
    monkeypatch.setattr(start, "capture_extend", fail)
    target = Target()
    server = scheduler(target)
    tails = server.draft_worker.target_worker.model_runner.capture_tail_hooks

    def original(owner: Any) -> str:
        target(torch.randn(ROWS, HIDDEN))
        tails[0](None, None, None, ROWS)
        return "captured"

    assert start.captured(original, server) == "captured" and start.ahead_of(server.draft_worker) is None


def test_a_failed_capture_takes_the_hooks_out(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> None:
    monkeypatch.setenv(start.SETTING, "9")
    server = scheduler(Target())
    with pytest.raises(RuntimeError, match="no room"):
        start.captured(fail, server)
    model = server.draft_worker.target_worker.model_runner.model
    assert not any(module._forward_hooks for module in model.modules())
