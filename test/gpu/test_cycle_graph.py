"""The cycle graph on a GPU: thousands of replays against the eager program, and text against the split path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine" / "cycle_graph"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPLAYS = int(os.environ.get("CYCLE_REPLAYS", "10000"))
SCRIPT = Path(__file__).with_name("cycle_text.py")


class Toy:
    """Passes that are small functions of their static inputs, so that a wrong input changes every later cycle."""

    def __init__(self, buffers: Any, seed: int) -> None:
        b = self.buffers = buffers
        generator = torch.Generator().manual_seed(seed)
        device = b.table.device

        def noise(*size: int) -> Any:
            return torch.randn(size, generator=generator).to(device)

        vocabulary, drafts = b.verify.logits.shape[1], b.extend.logits.shape[1]
        self.embed = noise(vocabulary, b.verify.hidden.shape[1])
        self.target = noise(vocabulary, vocabulary) * 3
        self.guess = self.target.argmax(dim=1) % drafts

    def draft(self) -> None:
        b = self.buffers
        token = (b.draft.token[:, 0] + (b.draft.lens % 3 == 0).long()) % b.extend.logits.shape[1]
        columns = [token]
        for _ in range(b.steps - 1):
            columns.append(self.guess[columns[-1]])
        # A hidden state that was lost on the way would move the first draft.
        shift = (b.draft.hidden[:, 0] > 1.5).long()
        columns[0] = (columns[0] + shift) % b.extend.logits.shape[1]
        b.draft.proposed.copy_(torch.stack(columns, dim=1))

    def verify(self) -> None:
        b = self.buffers
        place = (b.verify.positions + b.verify.slots) % 7
        logits = self.target[b.verify.tokens] + place.unsqueeze(1) * 0.01
        b.verify.logits.copy_(logits)
        b.verify.hidden.copy_(self.embed[b.verify.tokens] + b.verify.positions.unsqueeze(1) * 0.001)

    def extend(self) -> None:
        b = self.buffers
        size = b.extend.states.shape[1]
        states = b.extend.hidden[:, :size] * 0.5 + b.extend.hidden[:, size : 2 * size]
        b.extend.states.copy_(states)
        best = self.guess[b.extend.tokens % self.guess.shape[0]]
        b.extend.logits.copy_(
            torch.nn.functional.one_hot(best, b.extend.logits.shape[1]).float() + states[:, :1] * 0.0
        )


class Nothing:
    """No passes."""

    def draft(self) -> None: ...

    def verify(self) -> None: ...

    def extend(self) -> None: ...


def child(work: Any) -> Any:
    """A pass as a graph of its own, as upstream captures them."""
    from sglang.srt.speculative.cycle_graph.driver import KeptGraph

    work()
    torch.cuda.synchronize()
    graph = KeptGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize("shared", (True, False))
def test_replays_equal_the_eager_program(shared: bool) -> None:
    import cycles
    from sglang.srt.speculative.cycle_graph import kernels, program, steps
    from sglang.srt.speculative.cycle_graph.graphs import ChildPasses, capture

    shape = cycles.Shape(
        batch=8, live=8, vocabulary=211, draft_vocabulary=211, hidden=64, packed=192, requests=41, context=4001,
        shared=shared,
    )  # fmt: skip
    whole = cycles.make(shape, 5, kernels.parts(211), kernels.parts(211), device="cuda")
    plain = cycles.duplicate(whole)
    mine, other = Toy(whole, 1), Toy(plain, 1)
    # The passes are run once before their capture, and must not look tokens up that are still poison.
    steps.load(whole, torch.empty(0, dtype=torch.int64, device="cuda"), 0, 0)
    program.run(whole, steps, Nothing())
    passes = ChildPasses((child(mine.draft), child(mine.verify), child(mine.extend)))
    entry = capture(whole, passes, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    generator = torch.Generator().manual_seed(0)
    count = REPLAYS if shared else max(1, REPLAYS // 10)
    kept = 0
    for cycle in range(count):
        live = int(torch.randint(1, 9, (1,), generator=generator))
        rows = (torch.randperm(40, generator=generator)[:live] + 1).cuda()
        slot = cycle % 4
        kernels.load(whole, rows, slot, 0, cycle)
        entry.graph.replay()
        steps.load(plain, rows, slot, 0, cycle)
        program.run(plain, steps, other)
        if cycle % 50 == 0:
            # Long requests start anew, as finished ones give their rows to others.
            for relay in (whole.relay, plain.relay):
                relay.lengths.clamp_(max=3000)
        if cycle % 97 == 0 or cycle > count - 20:
            torch.cuda.synchronize()
            names = ("relay.lengths", "relay.bonus", "relay.token", "relay.hidden", "verify.tokens", "verify.slots",
                     "extend.tokens", "extend.lens", "extend.accepted", "draft.slots", "draft.hidden")  # fmt: skip
            left, right = cycles.tensors(whole), cycles.tensors(plain)
            for name in names:
                first = 1 if name.startswith("relay") else 0
                assert torch.equal(left[name][first:], right[name][first:]), (cycle, name)
            width = whole.width
            assert torch.equal(
                whole.results.tokens[slot, : live * width], plain.results.tokens[slot, : live * width]
            )
            assert torch.equal(whole.results.lengths[slot, :live], plain.results.lengths[slot, :live])
            kept += int(whole.results.lengths[slot, :live].sum())
            marks = whole.results.marks[slot].tolist()
            assert marks == sorted(marks) and marks[0] > 0
    assert kept > 0


@cache
def generate(off: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "SGLANG_FORK_DISABLE": off
    }
    command = [sys.executable, str(SCRIPT), "96"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"alone"')]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def test_text_alone_equals_the_split_path_token_for_token() -> None:
    found = generate("")
    assert found["alone"]["graph"] == found["alone"]["split"]
    assert found["verifies"]["graph"] == found["verifies"]["split"]


def test_text_in_batches_that_requests_join_and_leave() -> None:
    """Batches form by chance, and bf16 rounds by batch size: most texts are equal, none is nonsense."""
    found = generate("")["batch"]
    equal = sum(a == b for a, b in zip(found["graph"], found["split"], strict=True))
    assert equal >= len(found["graph"]) - 3


def test_cycles_ran_as_one_graph_and_the_others_were_counted() -> None:
    found = generate("")
    replays = sum(v for name, v in found["counters"].items() if name.startswith("cycle_graph_replays"))
    assert replays > 100
    assert set(found["fallbacks"].get("cycle-graph", {})) == {"a request has a logit bias"}
    assert found["sampled_accept"] > 1.2
