"""The draft's prefetch: what is asked for where, on which stream, and what a capture finds and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.fork import fallbacks
from sglang.srt.speculative.cycle_graph import graphs
from sglang.srt.speculative.cycle_graph.prefetch import branch as branches
from sglang.srt.speculative.cycle_graph.prefetch import kernel, start
from sglang.srt.speculative.cycle_graph.prefetch.branch import Branch
from sglang.srt.speculative.cycle_graph.prefetch.draft import EXTENDED, VERIFIED, Prefetch
from sglang.srt.speculative.cycle_graph.prefetch.plan import Point, Weight, choose, weight_of
from torch import nn

HIDDEN = 24


def weights(sizes: list[int]) -> tuple[Weight, ...]:
    return tuple(Weight(f"w{i}", torch.empty(size, dtype=torch.uint8)) for i, size in enumerate(sizes))


@given(st.lists(st.lists(st.integers(1, 500), max_size=3), min_size=1, max_size=5), st.integers(0, 900))
def test_what_is_asked_for_lies_inside_and_stays_below_the_limit(sizes: list[list[int]], most: int) -> None:
    flat = weights([size for group in sizes for size in group])
    by_name = {weight.name: weight for weight in flat}
    rest = list(flat)
    points = []
    for i, group in enumerate(sizes):
        points.append(Point(f"p{i}", tuple(rest[: len(group)])))
        rest = rest[len(group) :]
    plan = choose(points, most)
    assert list(plan) == [point.name for point in points]
    asked = dict.fromkeys(by_name, 0)
    unread = set(by_name)
    for point in points:
        for part in plan[point.name]:
            size, whole = part.memory.numel(), by_name[part.name].memory
            assert part.name in unread and size > 0 and size % kernel.UNIT == 0
            # Each byte once, in order, and inside the weight.
            assert part.start == asked[part.name] and part.start + size <= whole.numel()
            assert part.memory.data_ptr() == whole.data_ptr() + part.start
            asked[part.name] += size
        assert sum(asked[name] for name in unread) <= most
        unread -= {weight.name for weight in point.reads}


def test_the_next_weights_are_filled_up_in_their_order() -> None:
    a, b, c = weights([64, 320, 128])
    plan = choose([Point("first", (a,)), Point("second", (b,)), Point("third", (c,))], 160)
    found = {
        name: [(part.name, part.start, part.memory.numel()) for part in parts] for name, parts in plan.items()
    }
    assert found == {
        "first": [("w0", 0, 64), ("w1", 0, 96)],
        "second": [("w1", 96, 64)],
        "third": [("w2", 0, 128)],
    }


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, "missing"),
        (torch.zeros(8, 8, dtype=torch.float8_e4m3fn), "plain values"),
        (torch.zeros(8, 8, dtype=torch.int32), "plain values"),
        (torch.zeros(64, dtype=torch.bfloat16), "plain values"),
        (torch.zeros(8, 16, dtype=torch.bfloat16)[:, :8], "dense"),
        (torch.zeros(8, 8, dtype=torch.bfloat16).T[1:], "dense"),
        (torch.zeros(65, dtype=torch.bfloat16)[1:].view(8, 8), "dense"),
    ],
)
def test_weights_that_are_left_alone(tensor: Any, words: str) -> None:
    weight, reason = weight_of("w", tensor)
    assert weight is None and words in reason


def test_a_weight_is_its_own_bytes() -> None:
    tensor = nn.Parameter(torch.randn(7, 24, dtype=torch.float32).bfloat16())
    weight, _ = weight_of("w", tensor)
    assert weight is not None and weight.memory.numel() == 7 * 24 * 2
    assert weight.memory.data_ptr() == tensor.data_ptr() and not weight.memory.requires_grad


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(24, dtype=torch.uint8),
        torch.zeros(48, dtype=torch.uint8)[8:40],
        torch.zeros(64, dtype=torch.uint8)[::2],
        torch.zeros(32, dtype=torch.int8),
    ],
)
def test_ranges_that_the_instruction_does_not_take_are_refused(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="bytes"):
        kernel.check(memory)
    kernel.check(torch.zeros(48, dtype=torch.uint8)[16:])


class Product(nn.Module):
    def __init__(self, columns: int, rows: int, log: list[str], name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
        self.log, self.name = log, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(self.name)
        return x.new_zeros(x.shape[0], self.weight.shape[0])


class Step(nn.Module):
    def __init__(self, log: list[str], name: str, width: int = 0) -> None:
        super().__init__()
        self.log, self.name, self.width = log, name, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(self.name)
        return x[:, : self.width] if self.width else x


class Attention(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.qkv_proj = Product(2 * HIDDEN, 3 * HIDDEN, log, "qkv")
        self.attn = Step(log, "attn", HIDDEN)
        self.o_proj = Product(HIDDEN, HIDDEN, log, "o")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.gate_up_proj = Product(HIDDEN, 8 * HIDDEN, log, "gate_up")
        self.act_fn = Step(log, "act", 4 * HIDDEN)
        self.down_proj = Product(4 * HIDDEN, HIDDEN, log, "down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(log), Mlp(log)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.self_attn(torch.cat([x, x], dim=-1)))  # type: ignore[no-any-return]


class Inner(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.fc = Product(3 * HIDDEN, HIDDEN, log, "fc")
        self.layers = nn.ModuleList([Layer(log)])
        self.norm = Step(log, "norm")


class Draft(nn.Module):
    """As upstream's: its own forward is called as a function, those of its parts as modules."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.model, self.lm_head = Inner(log), Product(HIDDEN, 5 * HIDDEN, log, "head")
        self.logits_processor = Step(log, "logits")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != HIDDEN:
            x = self.model.fc(x)
        for layer in self.model.layers:
            x = layer(x)
        return self.logits_processor(self.model.norm(x))  # type: ignore[no-any-return]


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def on_streams(monkeypatch: pytest.MonkeyPatch, branch: Branch, log: list[str]) -> None:
    main, side = Stream("main", log), Stream("side", log)

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(branches, "prefetch", lambda memory: log.append(f"ask {memory.numel()}"))
    branch.stream = side


FORK = ["side waits for main", "on side"]


def test_asks_before_the_small_kernels_and_joins_behind_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    draft = Draft(log)
    prefetch = Prefetch(draft, 2048, Branch("cpu"))
    assert prefetch.skipped == []
    on_streams(monkeypatch, prefetch.branch, log)
    prefetch.install()
    draft.forward(torch.zeros(3, 3 * HIDDEN))
    # qkv 6912, o 1152, gate_up 9216, down 4608, head 5760 bytes.
    assert log == [
        "fc", *FORK, "ask 2048", "back", "qkv", *FORK, "ask 1152", "ask 896", "back", "attn", "o", "gate_up",
        *FORK, "ask 2048", "back", "act", "down", *FORK, "ask 2048", "back", "norm", "logits", "main waits for side",
    ]  # fmt: skip
    prefetch.remove()
    log.clear()
    draft.forward(torch.zeros(3, HIDDEN))
    assert log == ["qkv", "attn", "o", "gate_up", "act", "down", "norm", "logits"]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in draft.modules())


def test_between_the_passes_the_next_one_is_asked_for() -> None:
    prefetch = Prefetch(Draft([]), 11_000, Branch("cpu"))
    names = {point: [part.name for part in parts] for point, parts in prefetch.plan.items()}
    # fc takes 3456 bytes, so the limit reaches into the layer.
    assert names[VERIFIED] == ["fc", "qkv 0", "o 0"] and names[EXTENDED] == ["qkv 0", "o 0", "gate_up 0"]
    assert all(sum(part.memory.numel() for part in parts) <= 11_000 for parts in prefetch.plan.values())


def test_the_parent_graph_asks_beside_accept_and_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    prefetch = Prefetch(Draft([]), 2048, Branch("cpu"))
    on_streams(monkeypatch, prefetch.branch, log)
    monkeypatch.setattr(graphs, "add_child", lambda graph: log.append(graph))
    children: Any = ("draft", "verify", "extend")
    passes = graphs.ChildPasses(children, prefetch)
    passes.draft()
    passes.verify()
    passes.extend()
    passes.close()
    asked = [*FORK, "ask 2048", "back"]
    assert log == ["draft", "verify", *asked, "extend", *asked, "main waits for side"]
    log.clear()
    bare = graphs.ChildPasses(children)
    bare.verify()
    bare.extend()
    bare.close()
    assert log == ["verify", "extend"]


def test_a_join_without_a_fork_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A wait for a stream that no fork of this capture led to would end it.
    log: list[str] = []
    branch = Branch("cpu")
    on_streams(monkeypatch, branch, log)
    branch.join()
    branch.ask("nothing", ())
    branch.join()
    assert log == [] and not branch.asked


def worker(model: Any, device: str = "cpu") -> Any:
    return SimpleNamespace(device=device, draft_runner=SimpleNamespace(model=model))


def test_a_capture_finds_the_hooks_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start.SETTING, "1")
    draft = Draft([])
    drafter = worker(draft)

    def original(runner: Any, owner: Any, *, size: int) -> str:
        assert (runner, owner, size) == ("runner", drafter, 2)
        draft.forward(torch.zeros(3, 3 * HIDDEN))
        return "captured"

    for _ in range(2):
        assert start.captured(original, "runner", drafter, size=2) == "captured"
    made = start.prefetch_of(drafter)
    # A megabyte holds the whole draft, so all of it is asked for at the first point.
    assert made is not None and dict(made.branch.asked) == {"layer 0": 2}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in draft.modules())


def test_a_failed_capture_takes_the_hooks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start.SETTING, "1")
    draft = Draft([])

    def original(runner: Any, owner: Any) -> None:
        assert draft.model.norm._forward_pre_hooks
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        start.captured(original, "runner", worker(draft))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in draft.modules())


def quantised() -> Any:
    draft = Draft([])
    for module in draft.modules():
        if isinstance(module, Product):
            module.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int32), requires_grad=False)
    return draft


def test_some_weights_skipped_are_counted_and_the_rest_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start.SETTING, "1")
    fallbacks.reset()
    draft = Draft([])
    draft.model.layers[0].mlp.down_proj.weight = None  # type: ignore[union-attr,assignment]
    drafter = worker(draft)
    assert start.captured(lambda runner, owner: "captured", "runner", drafter) == "captured"
    made = start.prefetch_of(drafter)
    assert made is not None and "down 0" not in [part.name for part in made.plan["layer 0"]]
    assert fallbacks.snapshot()[start.PATH] == {"a weight is missing": 1}


@pytest.mark.parametrize(
    ("setting", "drafter", "reasons"),
    [
        ("", worker(Draft([])), set()),
        ("0", worker(Draft([])), set()),
        ("8", worker(nn.Linear(2, 2)), {"the draft is not of Llama's form"}),
        ("8", SimpleNamespace(device="cpu"), {"the draft is not of Llama's form"}),
        ("8", worker(quantised()), {"no weight of the draft can be asked for"}),
        ("8", worker(Draft([]), "meta"), {"not an NVIDIA GPU"}),
    ],
)
def test_captures_as_ever_where_nothing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, setting: str, drafter: Any, reasons: set[str]
) -> None:
    monkeypatch.setenv(start.SETTING, setting)
    fallbacks.reset()
    assert start.captured(lambda runner, owner: "captured", "runner", drafter) == "captured"
    assert start.prefetch_of(drafter) is None
    assert set(fallbacks.snapshot().get(start.PATH, {})) == reasons
